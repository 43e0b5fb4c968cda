"""Memory of one trainer rank: what is resident, and what each peak of a train step adds.

Exact, in bytes: shards of master weights, gradients and Adam moments (float32), with LoRA those of the adapters beside
a base in the compute dtype; parameters that FSDP2 gathers (a tied embedding for a whole pass, a head from its forward
to its backward pass; of the layers one computes, one is prefetched and one is on the wire); gradients before reduction.
Activations are estimated. With checkpointing the largest phase is within 10 % of what the trainer's own code takes on
fake tensors at real size (tests/standin/test_fake_memory.py); workspaces of kernels and fragmentation are not counted.
"""

from dataclasses import dataclass

from app.config import RunConfig
from app.config.device import DeviceKind
from app.config.offload import OptimizerOffload
from app.config.trainer import Checkpointing, Compile, Optimizer
from app.config.weight_sync import SnapshotPlace, SyncMode
from app.device import Device
from app.model.architecture import Architecture, Shapes, adapter_parameters, trained_parameters
from app.utils.units import GIB, MIB

Items = dict[str, float]  # label → bytes

FLOAT32 = 4  # bytes
LAYERS_GATHERED = 3
REDUCTIONS_IN_FLIGHT = 2
BACKWARD_OVER_FORWARD = 1.5  # a layer's activations with the gradients that flow through them
DELTA_CHUNK = 64  # tokens of a chunk of the delta rule
DELTA_LOOP_WIDTHS = 17.5  # float32 tensors as wide as its values that the delta rule keeps in transformers' torch loop
FUSED_WIDTHS = 8  # results as wide as the residual stream that fused operators do not keep
SYNC_BUFFERS = 2
BACKWARD = "backward of a layer"  # a phase


@dataclass(frozen=True, slots=True)
class TrainerMemoryPlan:
    """Memory of rank 0, the fullest: it also has the buffers of the weight sync."""

    bucket: float  # bytes of the largest bucket of a weight sync
    parameters: Items  # what a weight sync reads; part of `offloadable`
    offloadable: Items  # what colocate offloads while the engines generate
    resident: Items  # what is never offloaded
    peaks: dict[str, Items]  # what each peak of a train step adds
    syncing: Items  # what a weight sync adds: one full tensor in the engine's dtype, and buffers on a device


def plan_trainer(config: RunConfig, device: Device, model: Architecture) -> TrainerMemoryPlan:
    """Plan a trainer rank of this run."""
    item = config.device.dtype.bytes
    ranks = config.placement.trainer_ranks // config.trainer.replicas  # that share the parameters
    lora = config.model.lora
    shard = model.parameters / ranks
    trained = trained_parameters(model, lora) / ranks

    parameters = {"base": item * shard, "adapters": FLOAT32 * trained} if lora.enabled else {"masters": FLOAT32 * shard}
    offloadable = {**parameters, "gradients": FLOAT32 * trained}
    updating: Items = {}
    if config.trainer.optimizer is Optimizer.adamw:
        kept = updating if moments_on_host(config, device) else offloadable
        kept["Adam"] = 2 * FLOAT32 * trained
    # the reference of adapters is their base
    if config.algorithm.needs_reference and not lora.enabled:
        gathered = model.root_parameters if model.tied else model.vocabulary * model.hidden
        offloadable["reference"] = item * (shard + gathered)

    resident = {"runtime": device.trainer_runtime_gib * GIB}
    sync = config.weight_sync
    if sync.mode is SyncMode.delta and sync.snapshot is SnapshotPlace.device:
        resident["last synced weights"] = item * shard

    peaks = _forward_backward(config, device, model)
    if updating:
        peaks["optimizer update"] = updating
    if lora.enabled:
        syncing: Items = {"gathered": item * trained * ranks}
        return TrainerMemoryPlan(0.0, parameters, offloadable, resident, peaks, syncing)

    # a tensor above the bucket size has its own bucket
    largest = model.largest_tensor * item
    bucket = min(max((sync.bucket_mib or device.bucket_mib) * MIB, largest), model.parameters * item)
    syncing = {"gathered": largest, "sync buffers": SYNC_BUFFERS * bucket}
    if device.kind is DeviceKind.cpu:
        resident["sync buffers"] = syncing.pop("sync buffers")
    return TrainerMemoryPlan(bucket, parameters, offloadable, resident, peaks, syncing)


def moments_on_host(config: RunConfig, device: Device) -> bool:
    """Whether AdamW's moments are in host memory between updates, where `offload.optimizer` is resolved."""
    moves = config.trainer.optimizer is Optimizer.adamw and device.shares_memory
    return moves and config.offload.optimizer is OptimizerOffload.update


def _forward_backward(config: RunConfig, device: Device, model: Architecture) -> dict[str, Items]:
    item = config.device.dtype.bytes
    # one rank that computes in float32 gathers nothing
    gathers = config.placement.trainer_ranks > config.trainer.replicas or item != FLOAT32
    root = model.root_parameters * item * gathers if model.tied else 0.0
    layer = max(model.full_layer_parameters, model.linear_layer_parameters) * gathers
    head = model.vocabulary * model.hidden

    # a trajectory above the token budget has its own microbatch
    tokens = max(config.trainer.tokens_per_microbatch, config.rollout.max_tokens)
    logits = min(device.head_chunk, tokens * model.vocabulary) * FLOAT32

    full = tokens * _full_layer_activations(model, item)
    linear = tokens * _linear_layer_activations(model, item, device, device.linear_widths)
    kept_linear = tokens * _linear_layer_activations(model, item, device, device.linear_widths_kept)
    # Fused operators keep fewer results of norms, MLPs and rotary embeddings.
    fused = device.elementwise is not None and config.trainer.compile is not Compile.on
    spared = fused * tokens * item * FUSED_WIDTHS * model.hidden

    # Of a layer, what is kept until its backward pass, and what of that need not be computed again then.
    if config.trainer.activation_checkpointing is Checkpointing.none:
        kept_full, kept_linear = full - spared, kept_linear - spared
        there_full, there_linear = full - spared, linear - spared
    else:
        there_full, there_linear = (tokens * each for each in _kept_results(config, device, model))
        kept_full, kept_linear = (tokens * model.hidden * item + each for each in (there_full, there_linear))
    saved = model.full_layers * kept_full + (model.layers - model.full_layers) * kept_linear
    computing = max(
        BACKWARD_OVER_FORWARD * (full - spared) - there_full, BACKWARD_OVER_FORWARD * (linear - spared) - there_linear
    )

    # with LoRA the base has no gradients
    lora = config.model.lora.enabled
    trained_layer = adapter_parameters(model, config.model.lora) / model.layers if lora else layer
    head_gradient = 0 if lora else head

    phases: dict[str, Items] = {
        "loss and head": {
            "gathered": root if model.tied else head * item * gathers,
            "activations": saved,
            "head gradient": head_gradient * (FLOAT32 + item),
            "logits": 3 * logits,  # logits, probabilities, casts
        },
        BACKWARD: {
            "gathered": root + LAYERS_GATHERED * layer * item,
            "activations": saved + computing,
            # That of a head which is not the embedding is reduced at once.
            "unreduced gradients": head_gradient * item * model.tied
            + trained_layer * (item + REDUCTIONS_IN_FLIGHT * FLOAT32),
        },
    }
    if not lora:
        # The last layer's gradients are still being reduced.
        phases["backward of the embedding"] = {
            "gathered": root,
            "unreduced gradients": head * (item + FLOAT32) + layer * FLOAT32,
        }
    return phases


def _kept_results(config: RunConfig, device: Device, model: Architecture) -> tuple[float, float]:
    """Bytes per token that a recomputed layer keeps beside its input, with full and with linear attention."""
    item = config.device.dtype.bytes
    of_full = of_linear = 0.0
    checkpointing = config.trainer.activation_checkpointing
    if checkpointing is not Checkpointing.all:
        of_full += model.heads * (item * model.head_dim + FLOAT32 * device.softmax_width)
    if checkpointing is Checkpointing.matmuls:
        products = 2 if config.model.lora.enabled else 1  # the adapter's beside the layer's
        of_full += item * products * _outputs({**model.full_attention, **model.mlp})
        if model.linear is not None:
            of_linear += item * products * _outputs({**model.linear_attention, **model.mlp})
    return of_full, of_linear


def _outputs(shapes: Shapes) -> int:
    return sum(features for _, features in shapes.values())


def _full_layer_activations(model: Architecture, item: int) -> float:
    """Bytes per token that autograd keeps of a layer with full attention.

    Compute dtype: residual stream and norms (14 × hidden) and the outputs of the projections (each has `hidden`
    weights). float32: the inside of the norms.
    """
    return item * (14 * model.hidden + model.full_layer_parameters / model.hidden) + FLOAT32 * 2 * model.hidden


def _linear_layer_activations(model: Architecture, item: int, device: Device, kernel_widths: float) -> float:
    """Bytes per token that autograd keeps of a layer with linear attention; 0 without such layers.

    As in a layer with full attention, and in float32 what the chunked delta rule keeps: queries, keys, values and
    decays, and in a torch loop every intermediate result.
    """
    if model.linear is None:
        return 0.0
    widths = DELTA_LOOP_WIDTHS if device.linear_attention is None else kernel_widths
    delta = widths * model.linear.value_channels + 4 * DELTA_CHUNK * model.linear.value_heads
    compute = item * (14 * model.hidden + model.linear_layer_parameters / model.hidden)
    return compute + FLOAT32 * (2 * model.hidden + delta)

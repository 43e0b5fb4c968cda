"""Memory of one trainer rank: what is resident, and what each peak of a train step adds.

Exact, in bytes: shards of master weights, gradients and Adam moments (float32); parameters that FSDP2 gathers (the root
for a whole pass; of the layers one computes, one is prefetched and one is on the wire); gradients before reduction.
Activations are estimated, to within about a third.
"""

from dataclasses import dataclass

from app.config import RunConfig
from app.config.trainer import Checkpointing, Optimizer
from app.config.weight_sync import SnapshotPlace, SyncMode
from app.device import Device
from app.model.architecture import Architecture
from app.utils.units import GIB, MIB

Items = dict[str, float]  # label → bytes

FLOAT32 = 4  # bytes
LAYERS_GATHERED = 3
REDUCTIONS_IN_FLIGHT = 2
BACKWARD_OVER_FORWARD = 1.5  # a layer's activations with the gradients that flow through them
DELTA_CHUNK = 64  # tokens of a chunk of the delta rule
SYNC_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class TrainerMemoryPlan:
    """Memory of rank 0, the fullest: it also holds the buffers of the weight sync."""

    bucket: float  # bytes of the largest bucket of a weight sync
    offloadable: Items  # what colocate offloads while the engines generate
    resident: Items  # what is never offloaded
    peaks: dict[str, Items]  # what each peak of a train step adds
    gathered: Items  # what a weight sync adds: one full tensor in the engine's dtype


def plan_trainer(config: RunConfig, device: Device, model: Architecture) -> TrainerMemoryPlan:
    """Plan a trainer rank of this run."""
    item = config.device.dtype.bytes
    shard = model.parameters / config.placement.trainer_ranks
    sync = config.weight_sync

    # a tensor above the bucket size has its own bucket
    largest = model.largest_tensor * item
    bucket = min(max(sync.bucket_mib * MIB, largest), model.parameters * item)

    offloadable = {"masters": FLOAT32 * shard, "gradients": FLOAT32 * shard}
    if config.trainer.optimizer is Optimizer.adamw:
        offloadable["Adam"] = 2 * FLOAT32 * shard
    if config.algorithm.needs_reference:
        offloadable["reference"] = FLOAT32 * shard + model.root_parameters * item

    resident = {"sync buffers": SYNC_BUFFERS * bucket, "runtime": device.trainer_runtime_gib * GIB}
    if sync.mode is SyncMode.delta and sync.snapshot is SnapshotPlace.device:
        resident["last synced weights"] = item * shard

    peaks = _forward_backward(config, device, model)
    if config.trainer.optimizer is Optimizer.adamw and not device.steps_in_place:
        peaks["optimizer update"] = {"temporaries": FLOAT32 * shard}
    return TrainerMemoryPlan(bucket, offloadable, resident, peaks, {"gathered": largest})


def _forward_backward(config: RunConfig, device: Device, model: Architecture) -> dict[str, Items]:
    item = config.device.dtype.bytes
    root = model.root_parameters * item
    layer = model.layer_parameters
    head = model.vocabulary * model.hidden

    # a trajectory above the token budget has its own microbatch
    longest = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
    tokens = max(config.trainer.tokens_per_microbatch, longest)
    logits = min(device.head_chunk, tokens * model.vocabulary) * FLOAT32

    # of a checkpointed layer, the forward pass keeps only the input
    activations = tokens * _layer_activations(model, item)
    kept = uncheckpointed_layers(model, config.trainer.activation_checkpointing)
    saved = kept * activations + (model.layers - kept) * tokens * model.hidden * item

    return {
        "loss and head": {
            "gathered": root,
            "activations": saved,
            "head gradient": head * (FLOAT32 + item),
            "logits": 3 * logits,  # logits, probabilities, casts
        },
        "backward of a layer": {
            "gathered": root + LAYERS_GATHERED * layer * item,
            "activations": saved + BACKWARD_OVER_FORWARD * activations,
            "unreduced gradients": (head + layer) * item + REDUCTIONS_IN_FLIGHT * layer * FLOAT32,
        },
        # The last layer's gradients are still being reduced. FSDP2 has freed a head that is not the embedding.
        "backward of the embedding": {
            "gathered": root if model.tied else 0.0,
            "unreduced gradients": model.root_parameters * (item + FLOAT32) + layer * FLOAT32,
        },
    }


def uncheckpointed_layers(model: Architecture, checkpointing: Checkpointing) -> int:
    """Return how many layers keep their activations for the backward pass."""
    match checkpointing:
        case Checkpointing.none:
            return model.layers
        case Checkpointing.some:
            return model.layers // 2
        case Checkpointing.all:
            return 0


def _layer_activations(model: Architecture, item: int) -> float:
    """Bytes per token that autograd keeps of the largest layer.

    Compute dtype: residual stream and norms (12 × hidden) and the outputs of the projections (each has `hidden`
    weights). float32: the inside of the norms, and q, k, v and decays of the chunked delta rule.
    """
    float32 = 2 * model.hidden
    if model.linear is not None:
        float32 += 9 * model.linear.value_channels + 4 * DELTA_CHUNK * model.linear.value_heads
    return item * (12 * model.hidden + model.layer_parameters / model.hidden) + FLOAT32 * float32

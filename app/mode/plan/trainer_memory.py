"""The memory of one trainer rank, moment by moment: what stays, and what each part of a step adds.

Exact, in bytes: shards of float32 masters, gradients and Adam's moments; what FSDP2 gathers (the root stays gathered
during a pass, of the layers one computes, one is prefetched and one is on the wire); gradients before they are reduced.
Estimated: activations, from the tensors that autograd keeps of a layer (about a third either way).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from app.config import RunConfig
from app.config.device import DeviceKind
from app.config.trainer import Optimizer
from app.config.weight_sync import SnapshotPlace, SyncMode
from app.device import Device
from app.model.architecture import Architecture

Items = dict[str, float]  # what → bytes
MIB, GIB = 2**20, 2**30
MASTER = 4  # bytes of a float32
HEAD_CHUNK_BYTES = 2**26 * 4  # logits of a chunk of the head (app/model/lm_head.py: CHUNK_ELEMENTS)
HEAD_CHUNK_BYTES_CPU = 2**24 * 4
LAYERS_GATHERED = 3
REDUCTIONS_IN_FLIGHT = 2
BACKWARD_OVER_FORWARD = 1.5  # a layer's activations with the gradients that flow through them
DELTA_CHUNK = 64  # tokens of a chunk of the delta rule
PUSH_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class TrainerMemoryPlan:
    """Of the fullest rank, which is rank 0: it also holds the buffers of the push."""

    config: RunConfig
    device: Device
    model: Architecture

    @property
    def item(self) -> int:
        """Bytes of a number in the compute dtype."""
        return self.config.device.dtype.bytes

    @property
    def shard(self) -> float:
        """Parameters of a rank."""
        return self.model.parameters / self.config.placement.trainer_ranks

    @property
    def bucket(self) -> float:
        """Bytes of the largest bucket of a push: a tensor that is larger than the setting travels alone."""
        wanted = max(self.config.weight_sync.bucket_mib * MIB, self.model.largest_tensor * self.item)
        return min(wanted, self.model.parameters * self.item)

    @property
    def snapshot(self) -> SnapshotPlace | None:
        """Where a rank keeps its shard as it was pushed last; None: it does not."""
        sync = self.config.weight_sync
        return sync.snapshot if sync.mode is SyncMode.delta else None

    def offloadable(self) -> Items:
        """What colocate takes off the device while the engine generates."""
        adam = self.config.trainer.optimizer is Optimizer.adamw
        return {
            "masters": MASTER * self.shard,
            "gradients": MASTER * self.shard,
            **({"Adam": 2 * MASTER * self.shard} if adam else {}),
            **({"reference": MASTER * self.shard + self.root} if self.config.algorithm.needs_reference else {}),
        }

    def staying(self) -> Items:
        """What is there at any time."""
        items = {
            "push buffers": PUSH_BUFFERS * self.bucket,
            "runtime": self.device.trainer_runtime_gib * GIB,
        }
        if self.snapshot is SnapshotPlace.device:
            items["last pushed weights"] = self.item * self.shard
        return items

    @property
    def root(self) -> float:
        return self.model.root_parameters * self.item

    def moments(self) -> Iterator[tuple[str, Items]]:
        """What each moment of a train step adds to `offloadable` and `staying`."""
        model, item = self.model, self.item
        head = model.vocabulary * model.hidden
        saved = self.saved_activations()
        chunk = HEAD_CHUNK_BYTES_CPU if self.device.kind is DeviceKind.cpu else HEAD_CHUNK_BYTES
        logits = 3 * min(chunk, self.tokens * model.vocabulary * MASTER)  # logits, probabilities, casts
        yield (
            "loss and head",
            {"gathered": self.root, "activations": saved, "head gradient": head * (MASTER + item), "logits": logits},
        )
        layer = model.layer_parameters
        yield (
            "backward of a layer",
            {
                "gathered": self.root + LAYERS_GATHERED * layer * item,
                "activations": saved + self.live_activations(),
                "unreduced gradients": (head + layer) * item + REDUCTIONS_IN_FLIGHT * layer * MASTER,
            },
        )
        yield (
            "backward of the embedding",
            {"gathered": self.root, "unreduced gradients": model.root_parameters * (item + MASTER)},
        )
        if self.config.trainer.optimizer is Optimizer.adamw and not self.device.steps_in_place:
            yield "optimizer update", {"temporaries": MASTER * self.shard}

    def gathering(self) -> Items:
        """What a push adds: one tensor, whole, in the engine's dtype."""
        return {"gathered": self.model.largest_tensor * self.item}

    @property
    def tokens(self) -> int:
        """Of the largest pass: a trajectory longer than the budget goes alone."""
        rollout = self.config.rollout
        longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
        return max(self.config.trainer.tokens_per_microbatch, longest)

    def saved_activations(self) -> float:
        """What the forward pass keeps: each layer's input, or without checkpointing everything."""
        model = self.model
        if self.config.trainer.activation_checkpointing:
            return model.layers * self.tokens * model.hidden * self.item
        linear = model.layers - model.full_layers
        return self.tokens * (model.full_layers * self._full_layer() + linear * self._linear_layer())

    def live_activations(self) -> float:
        """Of the layer that is being computed, with the gradients that flow through it."""
        return self.tokens * max(self._full_layer(), self._linear_layer()) * BACKWARD_OVER_FORWARD

    def _full_layer(self) -> float:
        """Bytes a token: q and k before and after norm and rotation (in float32 inside), v, the attention's output."""
        model = self.model
        width = model.heads * model.head_dim
        attention = (5 + model.gated) * width + 6 * model.kv_heads * model.head_dim
        return attention * self.item + self._norms_and_mlp()

    def _linear_layer(self) -> float:
        """Bytes a token: the convolution's ends, then float32 q, k, v and decays of the chunked delta rule."""
        linear = self.model.linear
        if linear is None:
            return 0.0
        delta = 3 * 3 * linear.values + 4 * DELTA_CHUNK * linear.value_heads
        return (2 * linear.channels + 3 * linear.values) * self.item + delta * MASTER + self._norms_and_mlp()

    def _norms_and_mlp(self) -> float:
        model = self.model
        return (6 * model.hidden + 4 * model.ffn) * self.item + 2 * model.hidden * MASTER

"""The weight sync's extension of a trainer rank: gathers shards into buckets and sends them.

Gathering is a collective, so all ranks do it for every bucket. There are two buffers, outside of the memory saver's
regions: bucket k + 1 is gathered while bucket k is sent and loaded. On a device they exist during a sync only, since
training needs their memory; and each handle of transport `ipc` wraps a buffer's storage once more, which would grow
with the run. On a CPU they are kept.

The driver imports this module to name its methods, so torch is imported in functions.
"""

import re
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.config.weight_sync import SnapshotPlace
from app.trainer.rank import TrainerRank
from app.types import TrainerMemory
from app.weight_sync.buckets import Bucket, ReadyBucket, Receivers, TensorMeta

if TYPE_CHECKING:
    from torch import Tensor

    from app.weight_sync.delta import DeltaEncoder

BUFFERS = 2


class Sender:
    """Base of the transports' senders; sends nothing itself.

    Lifecycle:
        1. `describe`, then `prepare` with the bucket plan.
        2. For each sync: `begin`, `send_and_gather_next` for each bucket in order, `finish`.
        3. `abort` after a failure, `release` to free the buffers; the next `begin` starts from scratch.
        4. `close` once.
    """

    on_all_ranks = False  # whether every rank gathers into buffers, or rank 0 alone

    def __init__(self, trainer_rank: TrainerRank):
        from app.model.policy import named_checkpoint_tensors

        self.trainer_rank = trainer_rank
        self.rank_index = trainer_rank.rank
        self.device = trainer_rank.torch_device
        self.dtype = trainer_rank.spec.dtype.name
        self.tensors = dict(named_checkpoint_tensors(trainer_rank.model))
        self.buckets: Sequence[Bucket] = ()
        self.buffers: list[Tensor] = []
        self.ready: dict[int, ReadyBucket] = {}  # by buffer
        self.delta_encoder: DeltaEncoder | None = None
        self.engines: Collection[int] = ()  # of the current sync
        self.tensor_parallel = 1  # ranks of an engine
        self._keeps_buffers = self.device.type == "cpu"
        self._has_buffers = self.on_all_ranks or self.rank_index == 0

        self.receivers = Receivers.every_rank
        if not self.on_all_ranks:
            has_gather = trainer_rank.device.has_gather
            self.receivers = Receivers.rank_0 if has_gather else Receivers.rank_0_by_all_gather

    def describe(self) -> list[TensorMeta]:
        from app.model.policy import FLOAT32_PARAMETERS

        return [
            TensorMeta(name, "float32" if name.endswith(FLOAT32_PARAMETERS) else self.dtype, tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def unsynced(self) -> list[str]:
        """Return parts of names, such as `visual.`, that only checkpoint tensors outside of the sync have."""
        from app.model.hf_checkpoint import open_checkpoint

        with open_checkpoint(self.trainer_rank.spec.model_path) as checkpoint:
            return unsynced_parts(checkpoint.names, self.tensors)

    def prepare(self, buckets: Sequence[Bucket], snapshot: SnapshotPlace | None, tensor_parallel: int) -> None:
        """Set the bucket plan. `snapshot`: where a delta sync keeps its snapshot."""
        self.buckets = buckets
        self.tensor_parallel = tensor_parallel
        if snapshot is not None:
            from app.weight_sync.delta import DeltaEncoder

            self.delta_encoder = DeltaEncoder(self.tensors, self.dtype, on_host=snapshot is SnapshotPlace.host)
        self.buffers = []
        if self._keeps_buffers:
            self._allocate_buffers()

    def begin(self, version: int, base: int | None, engines: Collection[int]) -> ReadyBucket:
        """Start the sync of policy `version`: gather bucket 0.

        Args:
            base: The policy onto which it is a delta; None: a full sync.
            engines: Indices of the engines that receive it.
        """
        self.engines = engines
        self.trainer_rank.require_onloaded("weight sync", TrainerMemory.parameters)
        if not self.buffers:
            self._allocate_buffers()
        if self.delta_encoder is not None:
            self.delta_encoder.begin(version, base, len(self.buckets))
        return self._gather(0)

    def send_and_gather_next(self, index: int) -> ReadyBucket | None:
        """Start sending bucket `index` and gather the next one meanwhile; None after the last.

        Gathering is a collective, so a rank that fails to send takes part in it before it raises.
        """
        try:
            self.send(index)
        finally:
            following = self._gather(index + 1) if index + 1 < len(self.buckets) else None
        return following

    def finish(self, timeout_s: float) -> None:
        """Wait until the last bucket is sent, then free buffers of a device. All engines have loaded all buckets."""
        self.wait(timeout_s)
        if not self._keeps_buffers:
            self.release()
        self.trainer_rank.profiler.finish()

    def release(self) -> None:
        """Free the buffers. The next sync allocates them again."""
        self.buffers = []

    def export(self, folder: Path) -> None:
        """Write the float32 master parameters as a checkpoint, bypassing the buckets."""
        import torch

        from app.model.hf_export import export
        from app.model.sharding import full_tensor

        tensors = ((name, full_tensor(tensor.detach())) for name, tensor in self.tensors.items())
        if self.rank_index == 0:
            export(self.trainer_rank.spec.model_path, tensors, folder, torch.float32)
            return
        deque(tensors, maxlen=0)  # gathering is a collective: the other ranks take part and drop the result

    # --- for transports to override

    def allocate(self, size: int) -> "Tensor":
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def ipc_handle(self, index: int) -> str | None:
        """Return the IPC handle of gathered bucket `index`, where the transport has one."""

    def send(self, index: int) -> None:
        """Start sending bucket `index`, while the engines receive it."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the bucket that is being sent is sent."""

    def abort(self) -> None:
        """Stop the current sync. The next one starts from scratch."""

    def close(self) -> None:
        """Free everything, including memory that would outlive this process."""
        self.release()

    # --- buffers

    def _allocate_buffers(self) -> None:
        if not self._has_buffers:
            return
        size = max(bucket.bytes for bucket in self.buckets)
        if self.delta_encoder is not None:
            from app.weight_sync.delta import max_header_bytes

            size = max(bucket.bytes + max_header_bytes(bucket) for bucket in self.buckets)
        self.buffers = [self.allocate(size) for _ in range(min(BUFFERS, len(self.buckets)))]

    def _gather(self, index: int) -> ReadyBucket:
        import torch

        from app.weight_sync.gather import gather_full

        bucket = self.buckets[index]
        slot = index % BUFFERS
        buffer = self.buffers[slot] if self._has_buffers else None

        if self.delta_encoder is not None:
            self.ready[slot] = self.delta_encoder.pack(index, bucket, buffer, receivers=self.receivers)
        else:
            self.ready[slot] = ReadyBucket(bucket)
            for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                dtype = getattr(torch, meta.dtype)
                out = buffer[offset : offset + meta.bytes].view(dtype) if buffer is not None else None
                gather_full(self.tensors[meta.name], dtype, out=out, receivers=self.receivers)

        # what follows reads the buffer on another stream or in another process
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream().synchronize()
        return replace(self.ready[slot], ipc_handle=self.ipc_handle(index))


def unsynced_parts(names: Iterable[str], synced: Collection[str]) -> list[str]:
    """Return the first part of each name, with its point, that no synced name has at that place.

    >>> synced = ["model.norm.weight", "model.layers.0.mlp.weight"]
    >>> unsynced_parts([*synced, "model.visual.norm.bias", "model.layers.1.mlp.weight"], synced)
    ['layers.1.', 'visual.']
    """
    prefixes = {name[: dot.start()] for name in synced for dot in re.finditer(r"\.", name)}
    found = set()
    for name in names:
        *parts, _ = name.split(".")
        depth = next((depth for depth in range(len(parts)) if ".".join(parts[: depth + 1]) not in prefixes), None)
        if depth is not None:
            numbered = depth and parts[depth].isdecimal()
            found.add(f"{parts[depth - 1]}.{parts[depth]}." if numbered else f"{parts[depth]}.")
    return sorted(found)

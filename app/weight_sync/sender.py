"""The trainer ranks' part of a push: gathers shards (all, or what changed) into buckets and hands them over.

Gathering is a collective, so all ranks do it for every bucket. There are two buffers, allocated once and outside of any
region of the memory saver, so that bucket k + 1 is gathered while bucket k is on the wire and loaded.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.config.weight_sync import SnapshotPlace
from app.model.policy import FLOAT32_PARAMETERS, named_checkpoint_tensors
from app.types import TrainerMemory
from app.weight_sync import gather as shards
from app.weight_sync.buckets import Bucket, ReadyBucket, TensorMeta
from app.weight_sync.delta import Delta, Packed, envelope_room

if TYPE_CHECKING:
    from app.trainer.rank import TrainerRank

BUFFERS = 2


class Sender:
    """Attached to every trainer rank as part `sync`. A transport says which ranks keep what was gathered."""

    everywhere = False  # whether every rank keeps it, or rank 0 alone

    def __init__(self, host: "TrainerRank"):
        self.host, self.rank, self.device = host, host.rank, host.torch_device
        self.dtype = host.spec.dtype.name
        self.tensors = dict(named_checkpoint_tensors(host.model))
        self.buckets: Sequence[Bucket] = ()
        self.buffers: list[Tensor] = []
        self.packed: list[Packed] = []  # what lies in each of them
        self.delta: Delta | None = None

    def describe(self) -> list[TensorMeta]:
        """What is to be sent, in model order."""
        return [
            TensorMeta(name, "float32" if name.endswith(FLOAT32_PARAMETERS) else self.dtype, tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def prepare(self, buckets: Sequence[Bucket], snapshot: SnapshotPlace | None) -> None:
        """Take the plan, and allocate the buffers of the ranks that keep buckets. `snapshot`: for a delta push."""
        self.buckets = buckets
        if snapshot is not None:
            self.delta = Delta(self.tensors, self.dtype, on_host=snapshot is SnapshotPlace.host)
        self._allocate_buffers()

    def _allocate_buffers(self) -> None:
        if self.keeps:
            size = max(bucket.bytes + (envelope_room(bucket) if self.delta else 0) for bucket in self.buckets)
            self.buffers = []  # the old ones go before the new ones come
            self.buffers = [self.allocate(size) for _ in range(min(BUFFERS, len(self.buckets)))]

    @property
    def keeps(self) -> bool:
        return self.everywhere or self.rank == 0

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def first(self, version: int, base: int | None) -> ReadyBucket:
        """Gather bucket 0 of a push of policy `version` (`base`: only what changed since that one)."""
        self.host.require_onloaded("a push", TrainerMemory.parameters)
        if not self.buffers:
            self._allocate_buffers()
        self.packed = [Packed(bucket, None) for bucket in self.buckets[:BUFFERS]]
        if self.delta is not None:
            self.delta.begin(version, base, len(self.buckets))
        return self.gather(0)

    def advance(self, index: int) -> ReadyBucket | None:
        """Hand bucket `index` over, and gather the next one meanwhile; None after the last."""
        self.send(index)
        return self.gather(index + 1) if index + 1 < len(self.buckets) else None

    def gather(self, index: int) -> ReadyBucket:
        """Fill the buffer of bucket `index`; returns what the driver needs to ask for it."""
        bucket, turn = self.buckets[index], index % BUFFERS
        buffer = self.buffers[turn] if self.keeps else None
        if self.delta is not None:
            self.packed[turn] = self.delta.pack(index, bucket, buffer, everywhere=self.everywhere)
        else:
            self.packed[turn] = Packed(bucket, None)
            self._gather_whole(bucket, buffer)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream().synchronize()
        packed = self.packed[turn]
        return ReadyBucket(packed.bucket, packed.changed, packed.reply, self.handle(index))

    def _gather_whole(self, bucket: Bucket, buffer: Tensor | None) -> None:
        for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            dtype = getattr(torch, meta.dtype)
            room = buffer[offset : offset + meta.bytes].view(dtype) if buffer is not None else None
            shards.gather(self.tensors[meta.name], dtype, room, everywhere=self.everywhere)

    def handle(self, index: int) -> str | None:
        """Of the buffer of a gathered bucket, where the transport has such a thing."""

    def send(self, index: int) -> None:
        """Start what this side does for a bucket that the engines are asked to take."""

    def finish(self, timeout_s: float) -> None:
        """Wait until this side is done with the last bucket."""

    def abandon(self) -> None:
        """Give up what is under way; the next push starts from scratch."""

    def release(self) -> None:
        """Free the buffers; the next push allocates them again."""
        self.buffers = []

    def close(self) -> None:
        """The run ends: leave nothing behind."""
        self.release()

    def export(self, folder: Path) -> None:
        """Write the parameters as they are (float32 masters) as a checkpoint, without going through a bucket."""
        from app.model.hf_export import export

        whole = self._whole_tensors()
        if self.rank == 0:
            export(self.host.spec.model_path, whole, folder, torch.float32)
        else:
            for _ in whole:  # gathering is a collective
                pass

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            tensor = tensor.detach()
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

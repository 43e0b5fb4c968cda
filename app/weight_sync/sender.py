"""The trainer ranks' part of a push: gathers shards into buckets, and rank 0 broadcasts them.

Gathering is a collective, so all ranks do it for every bucket; only rank 0 keeps what was gathered. Shards are cast to
the engine's dtype before they are gathered: half the bytes. There are two buffers, allocated once, so that the next
bucket is gathered while the last one is on the wire.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from app.errors import SyncError
from app.model.policy import named_checkpoint_tensors
from app.weight_sync import group
from app.weight_sync.plan import Bucket, TensorMeta

if TYPE_CHECKING:
    from app.trainer.rank import TrainerRank

BUFFERS = 2
KEPT_FLOAT32 = ("A_log", "dt_bias")  # linear attention's decay, which engines keep in float32 too


class Sender:
    """Attached to every trainer rank; rank 0 is the source."""

    def __init__(self, host: "TrainerRank"):
        self.model, self.rank, self.device = host.model, host.rank, host.torch_device
        self.dtype = host.spec.dtype.name
        self._tensors = dict(named_checkpoint_tensors(self.model))
        self._buckets: Sequence[Bucket] = ()
        self._buffers: list[torch.Tensor] = []
        self._group: dist.ProcessGroup | None = None
        self._work: Any = None

    def describe(self) -> list[TensorMeta]:
        """What is to be sent, in model order."""
        return [
            TensorMeta(name, "float32" if name.endswith(KEPT_FLOAT32) else self.dtype, tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        ]

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Take the plan; rank 0 allocates its buffers."""
        self._buckets = buckets
        size = max(bucket.bytes for bucket in buckets)
        if self.rank == 0:
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]

    def gather(self, index: int) -> None:
        """Collect bucket `index` from all ranks into rank 0's buffer."""
        bucket = self._buckets[index]
        with torch.no_grad():
            for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                shard = self._tensors[meta.name].detach().to(getattr(torch, meta.dtype))
                whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
                if self.rank == 0:
                    room = self._buffers[index % BUFFERS][offset : offset + meta.bytes]
                    room.view(whole.dtype).copy_(whole.reshape(-1))

    def connect(self, *, backend: str, url: str, world_size: int, name: str, timeout_s: float) -> None:
        """Rank 0 joins the group of the engines; the others have nothing to do."""
        if self.rank == 0:
            self._group = group.join(
                backend=backend, url=url, world_size=world_size, rank=0, name=name, timeout_s=timeout_s
            )

    def disconnect(self) -> None:
        """Leave the group; what is still on its wire is given up."""
        if self._group is not None:
            abandoned, self._group = self._group, None
            if self._work is not None:
                abandoned._get_backend(self.device).abort()  # a broadcast that nobody will receive
                self._work = None
            dist.destroy_process_group(abandoned)

    def send(self, index: int) -> None:
        """Start the broadcast of a gathered bucket."""
        if self.rank == 0:
            if self._group is None:
                raise SyncError("trainer rank 0: send before connect")
            buffer = self._buffers[index % BUFFERS][: self._buckets[index].bytes]
            self._work = dist.broadcast(buffer, src=0, group=self._group, async_op=True)

    def sent(self, index: int, timeout_s: float) -> None:
        """Wait until the broadcast of bucket `index` is through."""
        if self.rank == 0 and self._work is not None:
            try:
                self._work.wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                told = str(error).splitlines()[0]
                raise SyncError(f"trainer rank 0: broadcast of bucket {index} failed: {told}") from error
            self._work = None

"""A delta push on the trainer's side: only what changed since the last push, bit for bit.

After one step at a usual learning rate about 99 % of the 16-bit weights are as they were, because the change is
smaller than half their spacing (SparseRL-Sync, arXiv 2605.07330; verl, slime and TRL do the like). Every rank keeps its
shards as they were pushed last, compares, and the entries of all ranks are gathered in the coordinates of the
checkpoint's tensors. How they are written stands in app/wire.py.

Always: what is kept is what a message was made of, so after a failed push only a full one is right; a tensor whose
entries would take more room than itself is sent whole; a message fits where its whole bucket would.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from app.weight_sync import gather as shards
from app.weight_sync.buckets import Bucket, TensorMeta
from app.weight_sync.snapshot import ShardSnapshot
from app.wire import BLOCK_ITEMS, BLOCKS, ENVELOPE, LOW, VALUES, DeltaHeader, SparseTensorMeta

LARGEST = 2**31 - 1  # elements that a position can name
PAIR_BYTES = 6  # an entry between trainer ranks: int32 position, 16-bit value


@dataclass(frozen=True, slots=True)
class Packed:
    """What lies in a buffer."""

    bucket: Bucket
    changed: int | None  # elements that differ; None: nothing was compared
    reply: str | None = None  # what an engine that took it answers


class Delta:
    """The kept shards of one rank, and the push that is being packed."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: str, *, on_host: bool):
        self.tensors, self.dtype, self.on_host = tensors, dtype, on_host
        self.kept: dict[str, ShardSnapshot] = {}
        distributed = [tensor for tensor in tensors.values() if isinstance(tensor, DTensor)]
        mesh = distributed[0].device_mesh if distributed else None
        self.ranks = mesh.size() if mesh is not None else 1
        self.group: Any = mesh.get_group() if mesh is not None and self.ranks > 1 else None
        self.rank = dist.get_rank(self.group) if self.group is not None else 0

    def begin(self, version: int, base: int | None, messages: int) -> None:
        """A push of policy `version` onto `base`; None: a full one."""
        if base is not None and not self.kept:
            raise RuntimeError("a delta was asked for before any full push")
        self.version, self.base, self.messages = version, base, messages

    def forget(self) -> None:
        """Free what is kept; the next push is full."""
        self.kept = {}

    @torch.no_grad()
    def pack(self, index: int, bucket: Bucket, buffer: Tensor | None, *, everywhere: bool) -> Packed:
        """Write message `index` into `buffer` (on the ranks that have one); a collective of all ranks."""
        envelope = DeltaHeader(self.version, self.base, index, self.messages)
        if self.base is None:
            for meta in bucket.tensors:
                self._keep(meta)
            return self._write(envelope, bucket.tensors, None, buffer, everywhere)
        compared = [meta for meta in bucket.tensors if comparable(meta)]
        mine = [self._changes(meta) for meta in compared]
        counts = self._counts([position.numel() for position, _ in mine])  # [R][T]
        totals = [sum(each) for each in zip(*counts, strict=True)]
        sparse = [SparseTensorMeta(meta.name, meta.shape, total) for meta, total in zip(compared, totals, strict=True)]
        small = [each.bytes < meta.bytes for each, meta in zip(sparse, compared, strict=True)]
        sent = [at for at, fits in enumerate(small) if fits and totals[at]]
        large = {meta.name for meta, fits in zip(compared, small, strict=True) if not fits}
        whole = [meta for meta in bucket.tensors if not comparable(meta) or meta.name in large]
        envelope = DeltaHeader(self.version, self.base, index, self.messages, tuple(sparse[at] for at in sent))
        entries = self._gathered([mine[at] for at in sent], [[row[at] for at in sent] for row in counts], everywhere)
        packed = self._write(envelope, whole, entries, buffer, everywhere)
        return Packed(packed.bucket, sum(totals), packed.reply)

    def _keep(self, meta: TensorMeta) -> None:
        if not comparable(meta):
            return
        shard = local(self.tensors[meta.name])
        if meta.name not in self.kept:
            self.kept[meta.name] = ShardSnapshot(shard, getattr(torch, meta.dtype), on_host=self.on_host)
        self.kept[meta.name].replace(shard)

    def _changes(self, meta: TensorMeta) -> tuple[Tensor, Tensor]:
        """Positions in the whole tensor, and values, of what changed in this rank's part of it."""
        tensor = self.tensors[meta.name]
        position, value = self.kept[meta.name].changes(local(tensor))
        if isinstance(tensor, DTensor):
            return position + first_item(tensor), value
        return (position, value) if self.rank == 0 else (position[:0], value[:0])

    def _counts(self, mine: Sequence[int]) -> list[list[int]]:
        """Entries by rank and tensor."""
        if self.group is None or not mine:
            return [list(mine)]
        device = self._device
        own = torch.tensor(mine, dtype=torch.int64, device=device)
        found = torch.empty(self.ranks * len(mine), dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(found, own, group=self.group)
        return found.view(self.ranks, -1).tolist()

    @property
    def _device(self) -> torch.device:
        return local(next(iter(self.tensors.values()))).device

    def _gathered(
        self, mine: Sequence[tuple[Tensor, Tensor]], counts: Sequence[Sequence[int]], everywhere: bool
    ) -> tuple[list[Tensor], Tensor] | None:
        """Positions by tensor, and all values behind one another; None where no entries are, or none are kept."""
        largest = max(sum(row) for row in counts)
        if not mine or not largest:
            return None
        if self.group is None:
            return [position for position, _ in mine], torch.cat([value for _, value in mine])
        room = largest + largest % 2  # entries; every rank's part begins aligned
        own = torch.zeros(room * PAIR_BYTES, dtype=torch.uint8, device=self._device)
        positions, values = _pair(own)
        count = sum(position.numel() for position, _ in mine)
        positions[:count] = torch.cat([position for position, _ in mine])
        values[:count] = torch.cat([value for _, value in mine])
        found = shards.gather_parts(own, self.group, everywhere=everywhere)
        if found is None:
            return None
        pairs = [
            list(zip(*(part[: sum(row)].split(list(row)) for part in _pair(each)), strict=True))
            for each, row in zip(found, counts, strict=True)
        ]  # [R][T]: rows of rank r stand before those of rank r + 1
        by_tensor = list(zip(*pairs, strict=True))
        return (
            [torch.cat([position for position, _ in parts]) for parts in by_tensor],
            torch.cat([value for parts in by_tensor for _, value in parts]),
        )

    def _write(
        self,
        envelope: DeltaHeader,
        whole: Sequence[TensorMeta],
        entries: tuple[list[Tensor], Tensor] | None,
        buffer: Tensor | None,
        everywhere: bool,
    ) -> Packed:
        """Lay the message out, by descending element size, and fill it."""
        text = envelope.encode()
        count = sum(each.entries for each in envelope.changed)
        blocks = sum(each.blocks for each in envelope.changed)
        lists = [TensorMeta(BLOCKS, "int32", (blocks,)), TensorMeta(LOW, "int16", (count,))]
        lists.append(TensorMeta(VALUES, self.dtype, (count,)))
        metas = [*whole, *(lists if count else ()), TensorMeta(ENVELOPE, "uint8", (len(text),))]
        message = Bucket(tuple(sorted(metas, key=lambda meta: -meta.item_bytes)))
        filled = _filling(envelope, entries, text) if buffer is not None else {}
        for meta, offset in zip(message.tensors, message.offsets, strict=True):
            room = buffer[offset : offset + meta.bytes] if buffer is not None else None
            if meta.name in self.tensors:
                typed = room.view(getattr(torch, meta.dtype)) if room is not None else None
                shards.gather(self.tensors[meta.name], getattr(torch, meta.dtype), typed, everywhere=everywhere)
            elif room is not None:
                room.copy_(filled[meta.name])
        return Packed(message, None, envelope.reply)


def comparable(meta: TensorMeta) -> bool:
    """Whether a tensor's changes can be told; what engines keep in float32 is small and sent whole."""
    return meta.item_bytes == 2 and Bucket((meta,)).bytes // 2 <= LARGEST


def envelope_room(bucket: Bucket) -> int:
    """Bytes that the envelope of a bucket takes at most."""
    widest = 2**63 - 1
    rows = tuple(SparseTensorMeta(meta.name, meta.shape, widest) for meta in bucket.tensors)
    return len(DeltaHeader(widest, widest, widest, widest, rows).encode())


def local(tensor: Tensor) -> Tensor:
    """This rank's part, flat."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)


def first_item(tensor: DTensor) -> int:
    """Where this rank's rows begin in the flat tensor."""
    if tensor.device_mesh.ndim != 1 or tensor.placements != (Shard(0),):
        raise RuntimeError(f"a delta push knows shards of rows, and these are {tensor.placements}")
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * (tensor.numel() // tensor.shape[0])


def _pair(both: Tensor) -> tuple[Tensor, Tensor]:
    """The int32 positions and 16-bit values of a flat byte tensor."""
    split = both.numel() // PAIR_BYTES * 4
    return both[:split].view(torch.int32), both[split:].view(torch.int16)


def _filling(envelope: DeltaHeader, entries: tuple[list[Tensor], Tensor] | None, text: bytes) -> dict[str, Tensor]:
    """The bytes of each list of a message."""
    filled = {ENVELOPE: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    if entries is not None:
        positions, values = entries
        blocks = [_by_block(position, each.blocks) for position, each in zip(positions, envelope.changed, strict=True)]
        lists = {BLOCKS: torch.cat(blocks), LOW: torch.cat(positions).to(torch.int16), VALUES: values}
        filled |= {name: each.contiguous().view(torch.uint8) for name, each in lists.items()}
    return filled


def _by_block(position: Tensor, blocks: int) -> Tensor:
    """How many of the ascending positions fall into each block, int32 [blocks]."""
    ends = torch.arange(1, blocks + 1, device=position.device) * BLOCK_ITEMS
    upto = torch.searchsorted(position, ends.clamp(max=LARGEST).to(position.dtype))
    return torch.diff(upto, prepend=upto.new_zeros(1)).to(torch.int32)

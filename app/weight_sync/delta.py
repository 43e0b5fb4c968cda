"""The trainer's side of a delta sync: sends only what changed since the last sync, bit for bit.

After one step at a typical learning rate about 99 % of the 16-bit weights round back to their old value
(SparseRL-Sync, arXiv 2605.07330; verl, slime and TRL have similar syncs). Every rank keeps a snapshot of its shards at
the last sync and compares (`shard_diff.py`). The changed entries of all ranks are gathered in the coordinates of the
checkpoint's tensors. rollout/engine/sglang_plugin/delta_loader.py documents the message format.

Invariants:
    - The snapshot is what the last message was made of, so only a full sync may follow a failed one.
    - A tensor whose entries would take more bytes than the tensor itself is sent in full.
    - A message fits into a buffer of its bucket's size plus `max_header_bytes`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from app.model.sharding import local_shard, own_rows
from app.rollout.engine.sglang_plugin.delta_loader import GAPS, HEADER, MORE, VALUES, DeltaHeader, SparseTensorMeta
from app.weight_sync.buckets import Bucket, ReadyBucket, Receivers, TensorMeta
from app.weight_sync.gather import all_gather, gather_by_rank, gather_full
from app.weight_sync.shard_diff import Changes, ShardSnapshot, diff_and_replace_all

MAX_ELEMENTS = 2**31 - 1  # of a tensor whose positions fit into int32
GATHERED_ENTRY_BYTES = 6  # between trainer ranks: int32 position, 16-bit value
Entries = tuple[list[Tensor], Tensor]  # of all ranks: positions by tensor, values of all tensors concatenated
Encoded = tuple[Tensor, Tensor]  # gap bytes and values of all tensors, concatenated


class DeltaEncoder:
    """The shard snapshots of one rank, and the encoder of the current sync.

    Lifecycle: `begin` once for each sync, then `pack` for each bucket in order. The first sync has to be full.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: str, *, on_host: bool):
        self.tensors = tensors
        self.dtype = dtype
        self.on_host = on_host
        self.snapshots: dict[str, ShardSnapshot] = {}

        meshes = [tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)]
        self.ranks = meshes[0].size() if meshes else 1
        self.process_group = meshes[0].get_group() if self.ranks > 1 else None
        self.rank_index = dist.get_rank(self.process_group) if self.process_group is not None else 0

    def begin(self, version: int, base: int | None, messages: int) -> None:
        if base is not None and not self.snapshots:
            raise RuntimeError("a delta sync needs a full sync before it")
        self.version = version
        self.base = base
        self.messages = messages

    @torch.no_grad()
    def pack(self, index: int, bucket: Bucket, buffer: Tensor | None, *, receivers: Receivers) -> ReadyBucket:
        """Write message `index` into `buffer` (None on ranks that receive nothing). A collective of all ranks."""
        if self.base is None:
            for meta in filter(is_comparable, bucket.tensors):
                shard = flat_shard(self.tensors[meta.name])
                if meta.name not in self.snapshots:
                    self.snapshots[meta.name] = ShardSnapshot(shard, getattr(torch, meta.dtype), on_host=self.on_host)
                self.snapshots[meta.name].replace(shard)
            return self._write(self._header(index), bucket.tensors, None, buffer, receivers)

        comparable = [meta for meta in bucket.tensors if is_comparable(meta)]
        changes = self._changes(comparable)
        counts = self._gather_counts([positions.numel() for positions, _ in changes])  # [R][T]
        totals = [sum(column) for column in zip(*counts, strict=True)]

        # sparse where that is smaller for sure; a tensor without changes is not sent at all
        sparse = [SparseTensorMeta(meta.name, meta.shape, n) for meta, n in zip(comparable, totals, strict=True)]
        smaller = {meta.name for meta, each in zip(comparable, sparse, strict=True) if each.max_bytes < meta.bytes}
        sent = [i for i, each in enumerate(sparse) if each.name in smaller and each.entries]
        full = [meta for meta in bucket.tensors if meta.name not in smaller]

        counts_sent = [[row[i] for i in sent] for row in counts]
        entries = self._gather_entries([changes[i] for i in sent], counts_sent, receivers)
        changed = [sparse[i] for i in sent]
        encoded = None
        if entries is not None:
            gaps, sizes = encode_gaps(entries[0])
            encoded = gaps, entries[1]
            changed = [replace(each, gaps=size) for each, size in zip(changed, sizes, strict=True)]
        return self._write(self._header(index, tuple(changed)), full, encoded, buffer, receivers, changed=sum(totals))

    def _header(self, index: int, changed: tuple[SparseTensorMeta, ...] = ()) -> DeltaHeader:
        return DeltaHeader(self.version, self.base, index, self.messages, changed)

    def _changes(self, metas: Sequence[TensorMeta]) -> list[Changes]:
        """Return the changes of this rank's shards, at positions in the full tensors. Rank 0 reports unsharded ones."""
        tensors = [self.tensors[meta.name] for meta in metas]
        shards = [flat_shard(tensor) for tensor in tensors]
        found = diff_and_replace_all([self.snapshots[meta.name] for meta in metas], shards)
        changes: list[Changes] = []
        for tensor, (positions, values) in zip(tensors, found, strict=True):
            if isinstance(tensor, DTensor):
                changes.append((positions.add_(shard_offset(tensor)), values))
            else:
                own = len(positions) if self.rank_index == 0 else 0
                changes.append((positions[:own], values[:own]))
        return changes

    def _gather_counts(self, own: Sequence[int]) -> list[list[int]]:
        """Gather the number of changed entries, by rank and tensor: [R][T]."""
        if self.process_group is None or not own:
            return [list(own)]
        local = torch.tensor(own, dtype=torch.int64, device=self._device)
        out = torch.empty(self.ranks * len(own), dtype=torch.int64, device=self._device)
        all_gather(out, local, self.process_group)
        return out.view(self.ranks, -1).tolist()

    @property
    def _device(self) -> torch.device:
        return local_shard(next(iter(self.tensors.values()))).device

    def _gather_entries(
        self, changes: Sequence[Changes], counts: Sequence[list[int]], receivers: Receivers
    ) -> Entries | None:
        """Gather the changes of all ranks; None if there are none, or on a rank that receives nothing.

        Args:
            changes: This rank's, by tensor.
            counts: Entries by rank and tensor: [R][T].
        """
        largest = max(sum(row) for row in counts)
        if not largest:
            return None

        own_positions = torch.cat([positions for positions, _ in changes])
        own_values = torch.cat([values for _, values in changes])
        if self.process_group is None:
            return list(own_positions.split(counts[0])), own_values

        # every rank sends the same number of bytes; an even number of entries keeps each rank's slice aligned
        capacity = largest + largest % 2
        payload = torch.zeros(capacity * GATHERED_ENTRY_BYTES, dtype=torch.uint8, device=self._device)
        positions, values = _split_payload(payload)
        positions[: len(own_positions)] = own_positions
        values[: len(own_values)] = own_values
        payloads = gather_by_rank(payload, self.process_group, receivers=receivers)
        if payloads is None:
            return None

        # [T][R]: the rows of rank r precede those of rank r + 1
        positions_of: list[list[Tensor]] = [[] for _ in changes]
        values_of: list[list[Tensor]] = [[] for _ in changes]
        for rank_payload, row in zip(payloads, counts, strict=True):
            rank_positions, rank_values = (flat[: sum(row)].split(row) for flat in _split_payload(rank_payload))
            for i in range(len(changes)):
                positions_of[i].append(rank_positions[i])
                values_of[i].append(rank_values[i])

        return [torch.cat(each) for each in positions_of], torch.cat([torch.cat(each) for each in values_of])

    def _write(
        self,
        header: DeltaHeader,
        full: Sequence[TensorMeta],
        encoded: Encoded | None,
        buffer: Tensor | None,
        receivers: Receivers,
        *,
        changed: int | None = None,
    ) -> ReadyBucket:
        """Lay out the message by descending element size, and write it into `buffer`."""
        text = header.encode()
        metas = [*full, TensorMeta(HEADER, "uint8", (len(text),))]
        if header.changed:
            metas.append(TensorMeta(GAPS, "uint8", (sum(tensor.gaps for tensor in header.changed),)))
            metas.append(TensorMeta(VALUES, self.dtype, (sum(tensor.entries for tensor in header.changed),)))

        contents = {HEADER: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        if encoded is not None:
            gaps, values = encoded
            contents |= {GAPS: gaps, VALUES: values.contiguous().view(torch.uint8)}

        message = Bucket(tuple(sorted(metas, key=lambda meta: -meta.item_bytes)))
        for meta, offset in zip(message.tensors, message.offsets, strict=True):
            out = buffer[offset : offset + meta.bytes] if buffer is not None else None
            if meta.name in self.tensors:
                dtype = getattr(torch, meta.dtype)
                typed = out.view(dtype) if out is not None else None
                gather_full(self.tensors[meta.name], dtype, out=typed, receivers=receivers)
            elif out is not None:
                out.copy_(contents[meta.name])

        return ReadyBucket(message, changed, header.reply)


def is_comparable(meta: TensorMeta) -> bool:
    """Whether a tensor's changes are sent. Tensors that engines keep in float32 are small and sent in full."""
    return meta.item_bytes == 2 and meta.bytes // 2 <= MAX_ELEMENTS


def max_header_bytes(bucket: Bucket) -> int:
    """Return the largest size of a bucket's header."""
    widest = 2**63 - 1
    rows = tuple(SparseTensorMeta(meta.name, meta.shape, widest, widest) for meta in bucket.tensors)
    return len(DeltaHeader(widest, widest, widest, widest, rows).encode())


def flat_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard, flat."""
    return local_shard(tensor).detach().reshape(-1)


def shard_offset(tensor: DTensor) -> int:
    """Return the position of this rank's first element in the flat tensor."""
    if tensor.device_mesh.ndim != 1 or tensor.placements != (Shard(0),):
        raise RuntimeError(f"a delta sync supports row shards only, not {tensor.placements}")
    return own_rows(tensor).start * (tensor.numel() // tensor.shape[0])


def _split_payload(payload: Tensor) -> tuple[Tensor, Tensor]:
    """View a flat byte tensor as int32 positions and 16-bit values."""
    split = payload.numel() // GATHERED_ENTRY_BYTES * 4
    return payload[:split].view(torch.int32), payload[split:].view(torch.int16)


def encode_gaps(positions: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Encode the ascending positions of each tensor, at least one of each (delta_loader.py).

    Returns:
        The bytes of all tensors [n] uint8, and how many each of them has.
    """
    flat = torch.cat(list(positions))
    firsts = torch.tensor([0, *(len(each) for each in positions[:-1])], device=flat.device).cumsum(0)
    gaps = torch.diff(flat, prepend=flat[:1]) - 1
    gaps[firsts] = flat[firsts]

    # most gaps take one byte: the others get theirs before it
    long = (gaps >= MORE).nonzero().squeeze(1)
    more = gaps[long].div(MORE, rounding_mode="floor").long()
    before = torch.repeat_interleave(long, more)
    before += torch.arange(len(before), device=flat.device)

    encoded = torch.full((len(flat) + len(before),), MORE, dtype=torch.uint8, device=flat.device)
    has_entry = torch.ones_like(encoded, dtype=torch.bool)
    has_entry[before] = False
    gaps[long] %= MORE
    encoded.masked_scatter_(has_entry, gaps.to(torch.uint8))

    total = torch.cat([more.new_zeros(1), more.cumsum(0)])
    starts = firsts + total[torch.searchsorted(long, firsts)]
    return encoded, torch.diff(starts, append=starts.new_full((1,), len(encoded))).tolist()

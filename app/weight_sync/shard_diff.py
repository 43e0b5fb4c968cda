"""Finds the entries of a shard that differ, bit for bit, from the last sync.

Most values are unchanged after a step. So a CPU compares 64-bit words of four 16-bit values and looks only into those
that differ, in chunks that fit into the cache, with a few threads: torch and numpy release Python's lock. An
accelerator compares in chunks that bound its temporaries.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

WORD = 4  # 16-bit values in 64 bits
WORD_BITS = 2  # of an index within a word
CPU_CHUNK = 1 << 19  # elements; multiples of WORD
DEVICE_CHUNK = 1 << 26
CPU_PART = 1 << 23  # elements that one thread compares at a time; a multiple of CPU_CHUNK
MAX_THREADS = 4  # memory, not arithmetic, is the limit
Changes = tuple[Tensor, Tensor]  # ascending positions [n] int32, new values [n] as int16 bits


class ShardSnapshot:
    """The values of one shard at the last sync, in the engine's 16-bit dtype."""

    def __init__(self, shard: Tensor, dtype: torch.dtype, *, on_host: bool):
        self.device = shard.device
        device = torch.device("cpu") if on_host else shard.device
        pinned = on_host and shard.device.type != "cpu"
        # padding elements stay zero
        self._values = torch.zeros(_padded(shard.numel()), dtype=dtype, device=device, pin_memory=pinned)

    @torch.no_grad()
    def replace(self, shard: Tensor) -> None:
        for start, chunk in _chunks(shard, self._chunk):
            self._values[start : start + chunk.numel()].copy_(chunk)

    @torch.no_grad()
    def diff_and_replace(self, shard: Tensor, begin: int = 0, end: int | None = None) -> Changes:
        """Compare the elements `begin` to `end` of the shard (flat, float masters), store and return what changed."""
        replace = _replace_on_cpu if self.device.type == "cpu" else _replace
        scratch = _scratch(min(self._chunk, self._values.numel()), self._values.dtype, self.device)
        positions = [torch.empty(0, dtype=torch.int32, device=self.device)]
        values = [torch.empty(0, dtype=torch.int16, device=self.device)]

        for offset, chunk in _chunks(shard[begin:end], self._chunk):
            start = begin + offset
            size = _padded(chunk.numel())
            old = self._values[start : start + size]
            new = scratch[:size]
            new[: chunk.numel()].copy_(chunk)
            new[chunk.numel() :].zero_()
            position, value = replace(old.view(torch.int16), new.view(torch.int16))
            positions.append(position.to(torch.int32).add_(start))
            values.append(value)

        return torch.cat(positions), torch.cat(values)

    @property
    def _chunk(self) -> int:
        return CPU_CHUNK if self.device.type == "cpu" else DEVICE_CHUNK


def diff_and_replace_all(snapshots: Sequence[ShardSnapshot], shards: Sequence[Tensor]) -> list[Changes]:
    """Do `ShardSnapshot.diff_and_replace` for every shard, on a CPU with several threads."""
    pairs = list(zip(snapshots, shards, strict=True))
    if not pairs or snapshots[0].device.type != "cpu":
        return [snapshot.diff_and_replace(shard) for snapshot, shard in pairs]

    parts = [
        [
            _threads().submit(snapshot.diff_and_replace, shard, begin, begin + CPU_PART)
            for begin in range(0, max(1, shard.numel()), CPU_PART)
        ]
        for snapshot, shard in pairs
    ]
    return [_joined([part.result() for part in each]) for each in parts]


def _joined(changes: Sequence[Changes]) -> Changes:
    if len(changes) == 1:
        return changes[0]
    return torch.cat([position for position, _ in changes]), torch.cat([value for _, value in changes])


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="compare")


_kept = threading.local()


def _scratch(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return scratch memory; a thread keeps its own, since touching fresh pages takes longer than using them."""
    if device.type != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    kept: Tensor | None = getattr(_kept, "scratch", None)
    if kept is None or kept.numel() < elements:
        kept = _kept.scratch = torch.zeros(max(elements, CPU_CHUNK), dtype=torch.int16)
    return kept[:elements].view(dtype)


def _padded(elements: int) -> int:
    return -(-elements // WORD) * WORD


def _chunks(flat: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, flat.numel(), size):
        yield start, flat[start : start + size]


def _replace(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions where `old` differs from `new`, and the new values. `old` becomes `new`."""
    on_device = old if old.device == new.device else old.to(new.device, non_blocking=True)
    position = (new != on_device).nonzero().squeeze(1)
    if position.numel():
        old.copy_(new)
    return position, new[position]


def _replace_on_cpu(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Same as `_replace`, by 64-bit words."""
    old_words = old.view(torch.int64).numpy()
    new_words = new.view(torch.int64).numpy()
    words = np.flatnonzero(new_words != old_words)

    changed_words = new_words[words]
    values = changed_words.view(np.int16)
    differ = np.flatnonzero(values != old_words[words].view(np.int16))
    old_words[words] = changed_words

    position = (words.astype(np.int32) * WORD)[differ >> WORD_BITS] + (differ & WORD - 1).astype(np.int32)
    return torch.from_numpy(position), torch.from_numpy(values[differ])

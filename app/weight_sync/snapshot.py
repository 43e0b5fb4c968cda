"""Which entries of a shard differ, bit for bit, from what was pushed last.

A CPU compares words of four 16-bit values, since most of them are unchanged after a step, and looks into those that are
not; chunks are small enough for the cache. An accelerator compares in chunks that bound the temporaries.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

WORD = 4  # 16-bit values in 64 bits
CPU_CHUNK = 1 << 20  # elements; multiples of WORD
DEVICE_CHUNK = 1 << 26


class ShardSnapshot:
    """The last pushed values of one shard, in the engine's 16-bit dtype."""

    def __init__(self, shard: Tensor, dtype: torch.dtype, *, on_host: bool):
        self.items, self.device = shard.numel(), shard.device
        device = torch.device("cpu") if on_host else shard.device
        pinned = on_host and shard.device.type != "cpu"
        # padded to whole words, which stay zero
        padded = -(-self.items // WORD) * WORD
        self._values = torch.zeros(padded, dtype=dtype, device=device, pin_memory=pinned)

    @torch.no_grad()
    def replace(self, shard: Tensor) -> None:
        """Take all of the shard (float masters, flat)."""
        for start, part in _chunks(shard, self._chunk):
            self._values[start : start + part.numel()].copy_(part)

    @torch.no_grad()
    def changes(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (int32, ascending) and new values (as int16 bits) of what changed, which is kept from now on."""
        replace = _replace_on_cpu if self.device.type == "cpu" else _replace
        scratch = torch.zeros(min(self._chunk, self._values.numel()), dtype=self._values.dtype, device=self.device)
        positions, values = [], []
        for start, part in _chunks(shard, self._chunk):
            padded = -(-part.numel() // WORD) * WORD
            new, kept = scratch[:padded], self._values[start : start + padded]
            new[part.numel() :].zero_()
            new[: part.numel()].copy_(part)
            position, value = replace(kept.view(torch.int16), new.view(torch.int16))
            if position.numel():
                positions.append(position.add_(start).to(torch.int32))
                values.append(value)
        if not positions:
            return torch.empty(0, dtype=torch.int32, device=self.device), scratch.new_empty(0, dtype=torch.int16)
        return torch.cat(positions), torch.cat(values)

    @property
    def _chunk(self) -> int:
        return CPU_CHUNK if self.device.type == "cpu" else DEVICE_CHUNK


def _chunks(flat: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, flat.numel(), size):
        yield start, flat[start : start + size]


def _replace(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Where `kept` differs from `new`, and the new values; `kept` becomes `new`."""
    old = kept if kept.device == new.device else kept.to(new.device, non_blocking=True)
    position = (new != old).nonzero().squeeze(1)
    if position.numel():
        kept.copy_(new)
    return position, new[position]


def _replace_on_cpu(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    new_words, kept_words = new.view(torch.int64).numpy(), kept.view(torch.int64).numpy()
    words = np.flatnonzero(new_words != kept_words)
    found = new_words[words]
    values = found.view(np.int16)
    differ = np.flatnonzero(values != kept_words[words].view(np.int16))
    kept_words[words] = found
    position = words[differ // WORD] * WORD + differ % WORD
    return torch.from_numpy(position), torch.from_numpy(values[differ])

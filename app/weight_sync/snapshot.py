"""Finds the entries of a shard that differ, bit for bit, from the last sync.

Most values are unchanged after a step. So a CPU compares 64-bit words of four 16-bit values and looks only into those
that differ, in chunks that fit into the cache. An accelerator compares in chunks that bound its temporaries.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

WORD = 4  # 16-bit values in 64 bits
CPU_CHUNK = 1 << 20  # elements; multiples of WORD
DEVICE_CHUNK = 1 << 26


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
        """Store the whole shard (flat, float masters)."""
        for start, chunk in _chunks(shard, self._chunk):
            self._values[start : start + chunk.numel()].copy_(chunk)

    @torch.no_grad()
    def diff_and_replace(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Compare the shard (flat, float masters) with the snapshot and store what changed.

        Returns:
            Ascending positions [n] int32 and new values [n] as int16 bits, on the shard's device.
        """
        replace = _replace_on_cpu if self.device.type == "cpu" else _replace
        scratch = torch.zeros(min(self._chunk, self._values.numel()), dtype=self._values.dtype, device=self.device)
        positions = [torch.empty(0, dtype=torch.int32, device=self.device)]
        values = [torch.empty(0, dtype=torch.int16, device=self.device)]

        for start, chunk in _chunks(shard, self._chunk):
            size = _padded(chunk.numel())
            old = self._values[start : start + size]
            new = scratch[:size]
            new[: chunk.numel()].copy_(chunk)
            new[chunk.numel() :].zero_()
            position, value = replace(old.view(torch.int16), new.view(torch.int16))
            positions.append(position.add_(start).to(torch.int32))
            values.append(value)

        return torch.cat(positions), torch.cat(values)

    @property
    def _chunk(self) -> int:
        return CPU_CHUNK if self.device.type == "cpu" else DEVICE_CHUNK


def _padded(elements: int) -> int:
    """Round up to whole words."""
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

    position = words[differ // WORD] * WORD + differ % WORD
    return torch.from_numpy(position), torch.from_numpy(values[differ])

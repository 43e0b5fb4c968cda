"""Layout of packed sequences, and exact conversion to a few padded batches and back.

    packed   a a a a b b c c c          [T, …]      input of embeddings, norms and linear layers
    buckets  a a a a    b b             [B, L, …]   sequences of similar length, padded on the right
             c c c ·

Invariants:
- Padding and unpadding are exact inverses on real tokens, and each is the gradient of the other.
- A mixer that only looks to the left (causal attention, a convolution or a recurrence over time) computes the same
  result for real tokens in a padded batch as for the sequence alone, because padding is on the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FILLED = 0.75  # a bucket takes sequences of at least this fraction of its longest one


@dataclass(frozen=True, slots=True)
class Packing:
    """Boundaries of `S` packed sequences of `T` tokens, and their layout in buckets of `P` padded positions."""

    boundaries: tuple[int, ...]  # S + 1: 0, then the end of each sequence
    cu_seqlens: Tensor  # [S + 1] int32: the same on the device
    host_cu_seqlens: Tensor  # [S + 1] int32: and on the host
    longest: int  # tokens
    shapes: tuple[tuple[int, int], ...]  # (sequences, padded length) of each bucket
    source: Tensor  # [P] int64: token index at each padded position; padding repeats a token of its sequence
    real: Tensor  # [P] bool: false at padding
    position: Tensor  # [T] int64: padded position of each token

    @classmethod
    def of(cls, boundaries: Sequence[int], device: torch.device | str = "cpu") -> "Packing":
        """Lay out the sequences with these S + 1 boundaries. Nothing waits for the device.

        Raises:
            ValueError: If the boundaries do not start at 0, or a sequence is empty.
        """
        lengths = [end - start for start, end in pairwise(boundaries)]
        if not lengths or boundaries[0] != 0 or min(lengths) < 1:
            raise ValueError(f"boundaries must rise from 0, without empty sequences: {list(boundaries)}")

        buckets = length_buckets(lengths)
        starts = torch.tensor(boundaries)
        cu_seqlens = starts.to(torch.int32)
        sources = []
        reals = []
        for bucket in buckets:
            length = torch.tensor([lengths[sequence] for sequence in bucket])[:, None]
            column = torch.arange(lengths[bucket[0]])[None, :]
            sources.append((starts[bucket][:, None] + torch.minimum(column, length - 1)).flatten())
            reals.append((column < length).flatten())

        source = torch.cat(sources)
        real = torch.cat(reals)
        position = torch.empty(boundaries[-1], dtype=torch.int64)
        position[source[real]] = real.nonzero().squeeze(1)

        return cls(
            boundaries=tuple(boundaries),
            cu_seqlens=to_device(cu_seqlens, device),
            host_cu_seqlens=cu_seqlens,
            longest=max(lengths),
            shapes=tuple((len(bucket), lengths[bucket[0]]) for bucket in buckets),
            source=to_device(source, device),
            real=to_device(real, device),
            position=to_device(position, device),
        )

    def pad(self, packed: Tensor) -> list[Tensor]:
        """[T, …] → one [B, L, …] per bucket."""
        padded = _Gather.apply(packed, self.source, self.position, None)
        buckets = padded.split([rows * length for rows, length in self.shapes])
        return [bucket.unflatten(0, shape) for bucket, shape in zip(buckets, self.shapes, strict=True)]

    def unpad(self, buckets: list[Tensor]) -> Tensor:
        """One [B, L, …] per bucket → [T, …]."""
        padded = torch.cat([bucket.flatten(0, 1) for bucket in buckets])
        return _Gather.apply(padded, self.position, self.source, self.real)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to a device. The copy is queued, from pinned memory, so that the host does not wait for it."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class _Gather(torch.autograd.Function):
    """`x[index]` with a gather as its gradient.

    `inverse` is the output position of each entry of `x`. `used` marks the entries that have one; None means all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, used: Tensor | None) -> Tensor:
        ctx.save_for_backward(inverse, used)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inverse, used = ctx.saved_tensors
        gradient = gradients[0].index_select(0, inverse)
        if used is not None:
            gradient = gradient.masked_fill_(~used.view(-1, *[1] * (gradient.dim() - 1)), 0.0)
        return gradient, None, None, None


def length_buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of `lengths` by similar length. The longest sequence of a bucket comes first.

    Each bucket is padded to its longest sequence; padding stays below 25 %.

    >>> length_buckets([10, 100, 9, 90])
    [[1, 3], [0, 2]]
    """
    buckets: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if buckets and lengths[index] >= FILLED * lengths[buckets[-1][0]]:
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets

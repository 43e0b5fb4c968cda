"""Layout of packed sequences, and exact conversion to a few padded batches and back.

    packed   a a a a b b c c c          [T, …]      input of embeddings, norms and linear layers
    buckets  a a a a    b b             [B, L, …]   sequences of similar length, padded on the right
             c c c ·

Sequences that begin alike can share the tokens of their beginning, which then are packed once. Whatever mixes tokens
gets every sequence written out in full:

    packed   p p p a a b c c            [T, …]      three completions of one prompt, p p p
    full     p p p a a p p p b p p p c c    [E, …]  end to end, for kernels that take boundaries
    buckets  p p p a a    p p p b ·     [B, L, …]

Invariants:
- Writing out and taking back are exact inverses on real tokens, and each is the gradient of the other: a shared token's
  result is that of its first sequence, and its gradient the sum over all its sequences, in float32 at least.
- A mixer that only looks to the left (causal attention, a convolution or a recurrence over time) computes the same
  result for real tokens in a padded batch as for the sequence alone, because padding is on the right. For the same
  reason a shared token has the same result in each of its sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILLED = 0.75  # a bucket takes sequences of at least this fraction of its longest one
CHUNK = 64  # tokens of a chunk of linear attention's kernels


@dataclass(frozen=True, slots=True)
class Layout:
    """`P` places for `T` packed tokens. A token may stand in several places, and its result is taken from the first."""

    source: Tensor  # [P] int64: the token at each place
    place: Tensor  # [T] int64: the first place of each token
    taken: Tensor  # [P] bool: whether it is a token's first place
    repeated: Tensor  # [R] int64: tokens with further places, those with most of them first
    copies: tuple[Tensor, ...]  # their further places: the k-th of all tokens that have so many, a prefix of `repeated`

    @classmethod
    def of(cls, source: np.ndarray, real: np.ndarray, device: torch.device | str) -> "Layout":
        """Lay out `source` [P], whose places that are not `real` [P] hold padding."""
        places = np.flatnonzero(real)
        order = places[np.argsort(source[places], kind="stable")]  # by token, then by place
        tokens, starts, counts = np.unique(source[order], return_index=True, return_counts=True)
        place = order[starts]
        taken = np.zeros(len(source), dtype=bool)
        taken[place] = True

        by_count = np.argsort(-counts, kind="stable")
        copies = []
        for copy in range(1, int(counts.max())):
            having = by_count[: np.count_nonzero(counts > copy)]
            copies.append(_on(order[starts[having] + copy], device))
        repeated = tokens[by_count[: np.count_nonzero(counts > 1)]]
        return cls(_on(source, device), _on(place, device), _on(taken, device), _on(repeated, device), tuple(copies))

    def write(self, packed: Tensor) -> Tensor:
        """[T, …] → [P, …]."""
        return _Write.apply(packed, self)

    def take(self, written: Tensor) -> Tensor:
        """[P, …] → [T, …]."""
        return _Take.apply(written, self)


@dataclass(frozen=True)
class Packing:
    """Boundaries of `S` sequences of `E` tokens in all, packed as `T` tokens, and their layouts."""

    boundaries: tuple[int, ...]  # S + 1: 0, then the end of each sequence, all written out
    cu_seqlens: Tensor  # [S + 1] int32: the same on the device
    host_cu_seqlens: Tensor  # [S + 1] int32: and on the host
    longest: int  # tokens
    full: Layout | None  # `E` places: the sequences end to end; None: as they are packed
    shapes: tuple[tuple[int, int], ...]  # (sequences, padded length) of each bucket
    buckets: Layout  # all buckets end to end; padding repeats the last token of its sequence

    @classmethod
    def of(
        cls, boundaries: Sequence[int], device: torch.device | str = "cpu", tokens: np.ndarray | None = None
    ) -> "Packing":
        """Lay out the sequences with these S + 1 boundaries. Nothing waits for the device.

        Args:
            boundaries: Of the sequences, written out.
            tokens: [E] int64, the packed token at each place of the written-out sequences. None: nothing is shared.

        Raises:
            ValueError: If the boundaries do not start at 0, or a sequence is empty.
        """
        lengths = [end - start for start, end in pairwise(boundaries)]
        if not lengths or boundaries[0] != 0 or min(lengths) < 1:
            raise ValueError(f"boundaries must rise from 0, without empty sequences: {list(boundaries)}")

        buckets = length_buckets(lengths)
        starts = np.array(boundaries)
        sources, reals = [], []
        for bucket in buckets:
            length = np.array([lengths[sequence] for sequence in bucket])[:, None]
            column = np.arange(lengths[bucket[0]])[None, :]
            sources.append((starts[bucket][:, None] + np.minimum(column, length - 1)).ravel())
            reals.append((column < length).ravel())
        source = np.concatenate(sources)

        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
        return cls(
            boundaries=tuple(boundaries),
            cu_seqlens=to_device(cu_seqlens, device),
            host_cu_seqlens=cu_seqlens,
            longest=max(lengths),
            full=None if tokens is None else Layout.of(tokens, np.ones(len(tokens), dtype=bool), device),
            shapes=tuple((len(bucket), lengths[bucket[0]]) for bucket in buckets),
            buckets=Layout.of(source if tokens is None else tokens[source], np.concatenate(reals), device),
        )

    @cached_property
    def chunk_indices(self) -> Tensor:
        """[chunks, 2] int32 on the device: the sequence of each chunk, and its place in it.

        Made for the first layer that needs it, since most models do not. Nothing waits for the device.
        """
        chunks = -(np.diff(self.boundaries) // -CHUNK)
        sequence = np.repeat(np.arange(len(chunks)), chunks)
        place = np.arange(len(sequence)) - np.repeat(chunks.cumsum() - chunks, chunks)
        return _on(np.stack([sequence, place], axis=1).astype(np.int32), self.cu_seqlens.device)

    def write_out(self, packed: Tensor) -> Tensor:
        """[T, …] → [E, …], the sequences end to end."""
        return packed if self.full is None else self.full.write(packed)

    def take_back(self, full: Tensor) -> Tensor:
        """[E, …] → [T, …]."""
        return full if self.full is None else self.full.take(full)

    def pad(self, packed: Tensor) -> list[Tensor]:
        """[T, …] → one [B, L, …] per bucket."""
        padded = self.buckets.write(packed).split([rows * length for rows, length in self.shapes])
        return [bucket.unflatten(0, shape) for bucket, shape in zip(padded, self.shapes, strict=True)]

    def unpad(self, buckets: list[Tensor]) -> Tensor:
        """One [B, L, …] per bucket → [T, …]."""
        return self.buckets.take(torch.cat([bucket.flatten(0, 1) for bucket in buckets]))


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to a device. The copy is queued, from pinned memory, so that the host does not wait for it."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _on(values: np.ndarray, device: torch.device | str) -> Tensor:
    return to_device(torch.from_numpy(values), device)


class _Write(torch.autograd.Function):
    """`packed[source]`. Its gradient is gathered, copy by copy, so that it does not depend on an order of additions."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return packed.index_select(0, layout.source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (written,) = gradients
        layout: Layout = ctx.layout
        gradient = written.index_select(0, layout.place)
        if layout.copies:
            total = gradient.index_select(0, layout.repeated)
            total = total.to(torch.promote_types(total.dtype, torch.float32))
            for places in layout.copies:
                total[: len(places)] += written.index_select(0, places)
            gradient[layout.repeated] = total.to(gradient.dtype)
        return gradient, None


class _Take(torch.autograd.Function):
    """`written[place]`, with a gather as its gradient."""

    @staticmethod
    def forward(ctx: Any, written: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return written.index_select(0, layout.place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (taken,) = gradients
        layout: Layout = ctx.layout
        gradient = taken.index_select(0, layout.source)
        return gradient.masked_fill_(~layout.taken.view(-1, *[1] * (gradient.dim() - 1)), 0.0), None


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

"""Sequences packed end to end, and the way to a few padded batches and back for whatever must not look over a border.

    packed   a a a a b b c c c          [T, …]      what embeddings, norms and linear layers work on
    buckets  a a a a    b b             [B, L, …]   sequences of similar length, padded on the right
             c c c ·

Always holds: padding and unpadding are exact inverses on real tokens, and each one's gradient is the other one. A mixer
that only looks to the left (causal attention, a convolution or a recurrence over time) gives real tokens the same
result in a padded batch as alone, since padding stands to the right of them.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from app.utils.lengths import length_buckets


@dataclass(frozen=True, slots=True)
class Packing:
    """The borders of a packed row of `T` tokens, and its layout as buckets of `P` padded positions in all."""

    cu_seqlens: Tensor  # [S + 1] int32: 0, then where each sequence ends
    longest: int  # tokens
    shapes: tuple[tuple[int, int], ...]  # (sequences, padded length) of each bucket
    source: Tensor  # [P] int64: the token at each padded position; padding repeats a token of its sequence
    real: Tensor  # [P] bool: false at padding
    place: Tensor  # [T] int64: the padded position of each token

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> "Packing":
        """Lay out the sequences whose borders are `cu_seqlens` [S + 1]; none may be empty."""
        borders = cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(borders)]
        if not lengths or borders[0] != 0 or min(lengths) < 1:
            raise ValueError(f"cu_seqlens must rise from 0, without empty sequences: {borders}")
        buckets = length_buckets(lengths)
        starts = torch.tensor(borders)
        sources, reals = [], []
        for bucket in buckets:
            own = torch.tensor([lengths[sequence] for sequence in bucket])[:, None]
            column = torch.arange(lengths[bucket[0]])[None, :]
            sources.append((starts[bucket][:, None] + torch.minimum(column, own - 1)).flatten())
            reals.append((column < own).flatten())
        source, real = torch.cat(sources), torch.cat(reals)
        place = torch.empty(borders[-1], dtype=torch.int64)
        place[source[real]] = real.nonzero().squeeze(1)
        device = cu_seqlens.device
        return cls(
            cu_seqlens=cu_seqlens.to(torch.int32),
            longest=max(lengths),
            shapes=tuple((len(bucket), lengths[bucket[0]]) for bucket in buckets),
            source=source.to(device),
            real=real.to(device),
            place=place.to(device),
        )

    def pad(self, packed: Tensor) -> list[Tensor]:
        """[T, …] → a [B, L, …] for each bucket."""
        padded = _Take.apply(packed, self.source, self.place, None)
        split = padded.split([rows * length for rows, length in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(split, self.shapes, strict=True)]

    def unpad(self, buckets: list[Tensor]) -> Tensor:
        """A [B, L, …] for each bucket → [T, …]."""
        return _Take.apply(torch.cat([bucket.flatten(0, 1) for bucket in buckets]), self.place, self.source, self.real)


class _Take(torch.autograd.Function):
    """`x[index]` whose gradient is a gather as well: `back` is where each entry of `x` went, `kept` whether it did."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, kept)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back, kept = ctx.saved_tensors
        gradient = gradients[0].index_select(0, back)
        if kept is not None:
            gradient = gradient.masked_fill_(~kept.view(-1, *[1] * (gradient.dim() - 1)), 0.0)
        return gradient, None, None, None

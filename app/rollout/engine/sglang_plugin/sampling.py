"""Runs inside SGLang's processes on a CPU: sampling from a large vocabulary with one random number a request.

torch's multinomial draws one for each token of the vocabulary, 3 million in a step of 64 requests with a vocabulary of
49,152: a fifth of the step. Here the probabilities are summed once, in blocks; a random number selects a block by their
cumulative sum, and a token in it. With top_k, top_p, min_p or a seed SGLang's own sampling runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SAMPLE = "sglang.srt.layers.sampler.sampling_from_probs_torch"
BLOCK = 64  # tokens


def sample(
    original: Callable[..., Tensor], probs: Tensor, sampling_seed: Tensor | None = None, positions: Any = None
) -> Tensor:
    """Return a token of each row of probs [B, V], [B] int32."""
    if sampling_seed is not None or probs.dtype != torch.float32 or not probs.shape[1]:
        return original(probs, sampling_seed, positions)
    tokens = select(probs, torch.rand(len(probs), 1, dtype=torch.float64))
    return original(probs, sampling_seed, positions) if tokens is None else tokens.int()


def select(probs: Tensor, uniform: Tensor) -> Tensor | None:
    """Return the first token of each row at which the cumulative probability exceeds a share of the row's sum.

    Args:
        probs: [B, V] float32; a row need not sum to 1.
        uniform: [B, 1] float64, the shares, in [0, 1).

    Returns:
        [B] int64; a token of probability 0 is never among them. None if a row has no finite, positive sum.
    """
    if excess := -probs.shape[1] % BLOCK:
        probs = torch.nn.functional.pad(probs, (0, excess))
    blocks = probs.unflatten(1, (-1, BLOCK))
    cumulative = blocks.sum(-1).double().cumsum(-1)
    total = cumulative[:, -1:]
    if not (total.isfinite() & (total > 0)).all():
        return None

    share = uniform * total
    block = _first_above(cumulative, share)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0)
    within = blocks[torch.arange(len(probs)), block[:, 0]].double().cumsum(-1)
    return (block * BLOCK + _first_above(within, share - before))[:, 0]


def _first_above(cumulative: Tensor, share: Tensor) -> Tensor:
    """Return the first index at which `cumulative` exceeds `share`, or, by rounding, the last at which it grows."""
    below = torch.nextafter(cumulative[:, -1:], torch.zeros_like(share))
    return torch.searchsorted(cumulative, torch.minimum(share, below), right=True)

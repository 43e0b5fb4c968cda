"""Log-probabilities without the logits: the head applied to a chunk of tokens at a time, forward and backward.

Always holds: no tensor with a vocabulary dimension is larger than one chunk, save the head's own gradient; softmax runs
in float32 (float64 for float64 inputs) whatever the head's dtype; the head's gradient is summed over the chunks in that
dtype too. The idea is Liger's fused linear cross-entropy (arXiv 2410.10989) and Megatron's recomputation: the backward
pass computes a chunk's logits again, which costs a third more head FLOPs and saves `tokens × vocabulary` floats.

With p = softmax(z), z = h·Wᵀ / temperature, y the target and H the entropy of p:
    d log p_y / dz_j = [j = y] − p_j        dH / dz_j = −p_j (log p_j + H)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**26  # logits of a chunk: 256 MiB in float32
CHUNK_ELEMENTS_CPU = 2**24  # enough for its caches to be used well


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both [N] float32.

    `hidden` [N, D], head `weight` [V, D] of the same dtype, `targets` [N] int64. The entropy carries a gradient only
    with `entropy_gradient`. `chunk_tokens` defaults to what `CHUNK_ELEMENTS` (on a CPU, `CHUNK_ELEMENTS_CPU`) allows.
    """
    elements = CHUNK_ELEMENTS_CPU if weight.device.type == "cpu" else CHUNK_ELEMENTS
    tokens = chunk_tokens or max(1, elements // weight.shape[0])
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, tokens)
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(hidden)
        logprobs = hidden.new_empty(len(targets), dtype=wide)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _chunks(len(targets), chunk_tokens):
            logits = _logits(hidden[part], weight, temperature)
            chosen = logits.gather(1, targets[part, None]).squeeze(1)
            normaliser[part] = torch.logsumexp(logits, dim=1)
            logprobs[part] = chosen - normaliser[part]
            probabilities = torch.exp(logits - normaliser[part, None])
            entropy[part] = normaliser[part] - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normaliser)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.zeros_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=_wide(hidden)) if wants_weight else None
        for part in _chunks(len(targets), ctx.chunk_tokens):
            logits = _logits(hidden[part], weight, ctx.temperature)
            through = _logits_gradient(
                logits,
                targets[part],
                normaliser[part],
                entropy[part],
                of_logprobs[part],
                None if of_entropy is None else of_entropy[part],
            )
            through = through.div_(ctx.temperature).to(hidden.dtype)
            if hidden_gradient is not None:
                torch.mm(through, weight, out=hidden_gradient[part])
            if weight_gradient is not None:
                _add_product(weight_gradient, through.T, hidden[part])
        cast = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient, cast, None, None, None


def _logits_gradient(
    logits: Tensor,  # [C, V]; used up
    targets: Tensor,  # [C]
    normaliser: Tensor,  # [C]
    entropy: Tensor,  # [C]
    of_logprobs: Tensor,  # [C]
    of_entropy: Tensor | None,  # [C]
) -> Tensor:
    """Gradient with respect to the tempered logits, [C, V]."""
    logs = logits.sub_(normaliser[:, None])
    probabilities = logs.exp()
    factor = of_logprobs[:, None]
    if of_entropy is not None:
        factor = logs.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(factor)
    return probabilities.mul_(factor).neg_().scatter_add_(1, targets[:, None], of_logprobs[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, without a temporary of `total`'s size where the dtypes allow it."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.T).to(_wide(hidden)).div_(temperature)


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))

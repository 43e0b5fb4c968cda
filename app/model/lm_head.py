"""Chunked LM head: log-probabilities and entropies without materializing all logits, forward and backward.

Invariants:
- No tensor with a vocabulary dimension is larger than one chunk, except the gradient of the head.
- Softmax runs in float32 (float64 for float64 inputs) whatever the dtype of the head. The gradient of the head is
  summed over chunks in that dtype too.

After Liger's fused linear cross-entropy (arXiv 2410.10989) and Megatron's recomputation: the backward pass recomputes
the logits of a chunk, which costs a third more head FLOPs and saves `tokens × vocabulary` floats.

With p = softmax(z), z = h·Wᵀ / temperature, y the target and H the entropy of p:
    d log p_y / dz_j = [j = y] − p_j        dH / dz_j = −p_j (log p_j + H)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from app.model.kernels import compiled_once


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    chunk_tokens: int,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target and the entropy of each distribution, both [N] float32.

    Args:
        hidden: [N, D].
        weight: [V, D] of the LM head, in the dtype of `hidden`.
        targets: [N] int64.
        temperature: Sampling temperature.
        entropy_gradient: Whether the entropy carries a gradient.
        chunk_tokens: Tokens per chunk.
        compiled: Whether torch compiles what is computed from a chunk's logits.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk_tokens, compiled)
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(hidden)
        statistics = compiled_once(_statistics) if compiled else _statistics
        logprobs = hidden.new_empty(len(targets), dtype=wide)
        normalizer = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs)

        for chunk in _chunks(len(targets), chunk_tokens):
            found = statistics(hidden[chunk] @ weight.T, targets[chunk], temperature)
            logprobs[chunk], normalizer[chunk], entropy[chunk] = found

        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        ctx.compiled = compiled
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = gradients
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)

        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_wide(hidden)) if needs_weight else None

        logits_gradient = compiled_once(_logits_gradient) if ctx.compiled else _logits_gradient

        for chunk in _chunks(len(targets), ctx.chunk_tokens):
            grad_logits = logits_gradient(
                hidden[chunk] @ weight.T,
                targets[chunk],
                normalizer[chunk],
                entropy[chunk],
                grad_logprobs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
                ctx.temperature,
            )

            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[chunk])

        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _statistics(
    products: Tensor,  # [C, V] in the dtype of the head
    targets: Tensor,  # [C]
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, logarithm of the normalizer, and entropy, of each token: [C] each."""
    logits = products.to(_wide(products)).div_(temperature)
    normalizer = torch.logsumexp(logits, dim=1)
    logprobs = logits.gather(1, targets[:, None]).squeeze(1) - normalizer
    probabilities = torch.exp(logits - normalizer[:, None])
    return logprobs, normalizer, normalizer - torch.linalg.vecdot(probabilities, logits)


def _logits_gradient(
    products: Tensor,  # [C, V] in the dtype of the head
    targets: Tensor,  # [C]
    normalizer: Tensor,  # [C]
    entropy: Tensor,  # [C]
    grad_logprobs: Tensor,  # [C]
    grad_entropy: Tensor | None,  # [C]
    temperature: float,
) -> Tensor:
    """Gradient with respect to the products of hidden states and head: [C, V] in their dtype."""
    logs = products.to(_wide(products)).div_(temperature).sub_(normalizer[:, None])
    probabilities = logs.exp()

    factor = grad_logprobs[:, None]
    if grad_entropy is not None:
        factor = logs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(factor)
    gradient = probabilities.mul_(factor).neg_().scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    return gradient.div_(temperature).to(products.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, without a temporary of the size of `total` if the dtypes are equal."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))

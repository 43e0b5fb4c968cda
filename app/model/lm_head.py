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

# Logits per chunk: 256 MiB in float32. Smaller on a CPU, for its caches.
CHUNK_ELEMENTS = 2**26
CHUNK_ELEMENTS_CPU = 2**24


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target and the entropy of each distribution, both [N] float32.

    Args:
        hidden: [N, D].
        weight: [V, D] of the LM head, in the dtype of `hidden`.
        targets: [N] int64.
        temperature: Sampling temperature.
        entropy_gradient: Whether the entropy carries a gradient.
        chunk_tokens: Tokens per chunk; by default `CHUNK_ELEMENTS` (on a CPU `CHUNK_ELEMENTS_CPU`) / V.
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
        normalizer = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs)

        for chunk in _chunks(len(targets), chunk_tokens):
            logits = _logits(hidden[chunk], weight, temperature)
            target_logits = logits.gather(1, targets[chunk, None]).squeeze(1)
            normalizer[chunk] = torch.logsumexp(logits, dim=1)
            logprobs[chunk] = target_logits - normalizer[chunk]
            probabilities = torch.exp(logits - normalizer[chunk, None])
            entropy[chunk] = normalizer[chunk] - torch.linalg.vecdot(probabilities, logits)

        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
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

        for chunk in _chunks(len(targets), ctx.chunk_tokens):
            grad_logits = _logits_gradient(
                _logits(hidden[chunk], weight, ctx.temperature),
                targets[chunk],
                normalizer[chunk],
                entropy[chunk],
                grad_logprobs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
            )
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)

            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[chunk])

        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _logits_gradient(
    logits: Tensor,  # [C, V]; overwritten
    targets: Tensor,  # [C]
    normalizer: Tensor,  # [C]
    entropy: Tensor,  # [C]
    grad_logprobs: Tensor,  # [C]
    grad_entropy: Tensor | None,  # [C]
) -> Tensor:
    """Gradient with respect to the temperature-scaled logits: [C, V]."""
    logs = logits.sub_(normalizer[:, None])
    probabilities = logs.exp()

    factor = grad_logprobs[:, None]
    if grad_entropy is not None:
        factor = logs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(factor)
    return probabilities.mul_(factor).neg_().scatter_add_(1, targets[:, None], grad_logprobs[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, without a temporary of the size of `total` if the dtypes are equal."""
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

"""Chunked LM head: log-probabilities and entropies without materializing all logits, forward and backward.

Invariants:
- No tensor with a vocabulary dimension is larger than one chunk, except the gradient of the head.
- Softmax runs in float32 (float64 for float64 inputs) whatever the dtype of the head. The gradients are summed over
  chunks in that dtype too.

After Liger's fused linear cross-entropy (arXiv 2410.10989) and Megatron's recomputation: the backward pass recomputes
the logits of a chunk, which costs a third more head FLOPs and saves `tokens × vocabulary` floats. A chunk may have a
part of the vocabulary, so that it fits into a CPU's caches: the parts' normalizers and entropies are merged.

With p = softmax(z), z = h·Wᵀ / temperature, y the target and H the entropy of p:
    d log p_y / dz_j = [j = y] − p_j        dH / dz_j = −p_j (log p_j + H)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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
    chunk_vocabulary: int | None = None,
    compiled: bool = False,
    adds_to_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target and the entropy of each distribution, both [N] float32.

    Args:
        hidden: [N, D].
        weight: [V, D] of the LM head, in the dtype of `hidden`.
        targets: [N] int64.
        entropy_gradient: Whether the entropy carries a gradient.
        chunk_vocabulary: Entries of the vocabulary per chunk; None: all.
        compiled: Whether torch compiles what is computed from a chunk's logits.
        adds_to_grad: Whether the backward pass adds the gradient of a float32 head to `weight.grad` itself, in place,
            instead of returning another tensor of its size. Only for `backward` of a leaf, not for
            `torch.autograd.grad`.
    """
    tiles = Tiles(chunk_tokens, min(chunk_vocabulary or len(weight), len(weight)))
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, tiles, compiled, adds_to_grad)
    return logprobs, entropy if entropy_gradient else entropy.detach()


@dataclass(frozen=True, slots=True)
class Tiles:
    """Chunk sizes of the logits [N, V]."""

    tokens: int  # at most, of a chunk
    vocabulary: int

    def rows(self, hidden: Tensor) -> list[slice]:
        """Return the tokens of chunks of about the same size. Without tokens, one empty chunk."""
        count = max(1, -(-len(hidden) // self.tokens))
        size = -(-len(hidden) // count)
        return [slice(index * size, min((index + 1) * size, len(hidden))) for index in range(count)]

    def columns(self, weight: Tensor) -> list[slice]:
        starts = range(0, len(weight), self.vocabulary)
        return [slice(start, min(start + self.vocabulary, len(weight))) for start in starts]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        tiles: Tiles,
        compiled: bool,
        adds_to_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        statistics = compiled_once(_statistics) if compiled else _statistics
        logprobs = hidden.new_empty(len(targets), dtype=_wide(hidden))
        normalizer = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs)

        chunks = _Chunks(hidden, weight, tiles, scratch=not compiled)
        for rows in tiles.rows(hidden):
            found = [
                statistics(*chunks.products(rows, columns), targets[rows] - columns.start, temperature)
                for columns in tiles.columns(weight)
            ]
            logprobs[rows], normalizer[rows], entropy[rows] = _merge(found)

        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.tiles = tiles
        ctx.compiled = compiled
        ctx.leaf = weight if adds_to_grad and weight.dtype == _wide(weight) else None
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = gradients
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)

        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        # Products over all of the vocabulary are not summed further.
        summed = hidden.dtype if ctx.tiles.vocabulary == len(weight) else _wide(hidden)
        grad_hidden = _Sum(hidden, summed) if needs_hidden else None
        grad_weight = _Sum(weight, _wide(weight), ctx.leaf) if needs_weight else None
        logits_gradient = compiled_once(_logits_gradient) if ctx.compiled else _logits_gradient

        chunks = _Chunks(hidden, weight, ctx.tiles, scratch=not ctx.compiled and grad_entropy is not None)
        for rows in ctx.tiles.rows(hidden):
            for columns in ctx.tiles.columns(weight):
                grad_logits = logits_gradient(
                    *chunks.products(rows, columns),
                    targets[rows] - columns.start,
                    normalizer[rows],
                    entropy[rows],
                    grad_logprobs[rows],
                    None if grad_entropy is None else grad_entropy[rows],
                    ctx.temperature,
                )
                if grad_hidden is not None:
                    grad_hidden.add_product(rows, grad_logits, weight[columns], first=columns.start == 0)
                if grad_weight is not None:
                    grad_weight.add_product(columns, grad_logits.T, hidden[rows], first=rows.start == 0)

        found = (None if each is None else each.result() for each in (grad_hidden, grad_weight))
        return *found, None, None, None, None, None


def _statistics(
    products: Tensor,  # [C, W] in the dtype of the head, for W entries of the vocabulary; overwritten
    scratch: Tensor | None,  # [C, W], overwritten
    targets: Tensor,  # [C] relative to the first of these entries; others are outside
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logit of the target (0 if it is outside), logarithm of the normalizer, and entropy, of each token: [C] each.

    The last two are those of a softmax over these entries alone.
    """
    logits = products.to(_wide(products)).div_(temperature)
    inside, index = _inside(targets, logits.shape[1])
    chosen = logits.gather(1, index[:, None]).squeeze(1)

    largest = logits.amax(dim=1)
    logits.sub_(largest[:, None])
    weights = torch.exp(logits, out=scratch)
    total = weights.sum(dim=1)
    log_total = total.log()
    entropy = log_total - logits.mul_(weights).sum(dim=1) / total
    return torch.where(inside, chosen, 0), largest + log_total, entropy


def _merge(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, logarithm of the normalizer, and entropy from those of parts of the vocabulary."""
    if len(parts) == 1:
        chosen, normalizer, entropy = parts[0]
        return chosen - normalizer, normalizer, entropy

    chosen, normalizers, entropies = (torch.stack(each) for each in zip(*parts, strict=True))  # [parts, C]
    normalizer = torch.logsumexp(normalizers, dim=0)

    # That of the choice of a part, and that within it.
    entropy = (torch.softmax(normalizers, dim=0) * (entropies + normalizer - normalizers)).sum(dim=0)
    return chosen.sum(dim=0) - normalizer, normalizer, entropy


def _logits_gradient(
    products: Tensor,  # [C, W] in the dtype of the head, for W entries of the vocabulary; overwritten
    scratch: Tensor | None,  # [C, W], overwritten
    targets: Tensor,  # [C] relative to the first of these entries; others are outside
    normalizer: Tensor,  # [C]
    entropy: Tensor,  # [C]
    grad_logprobs: Tensor,  # [C]
    grad_entropy: Tensor | None,  # [C]
    temperature: float,
) -> Tensor:
    """Gradient with respect to the products: [C, W] in their dtype; compiled, in their place."""
    inside, index = _inside(targets, products.shape[1])
    of_target = torch.where(inside, grad_logprobs, 0) / temperature
    factor = -grad_logprobs[:, None] / temperature
    logs = products.to(_wide(products)).div_(temperature).sub_(normalizer[:, None])

    if grad_entropy is None:
        gradient = logs.exp_().mul_(factor)
    else:
        probabilities = torch.exp(logs, out=scratch)
        of_entropy = logs.add_(entropy[:, None]).mul_(grad_entropy[:, None] / -temperature)
        gradient = probabilities.mul_(of_entropy.add_(factor))

    if torch.compiler.is_compiling():
        # One pass from the products to the gradient: a scatter would have it written in float32 before.
        column = torch.arange(products.shape[1], device=products.device)
        gradient = gradient + torch.where(column == targets[:, None], of_target[:, None], 0)
        return products.copy_(gradient)
    return gradient.scatter_add_(1, index[:, None], of_target[:, None]).to(products.dtype)


def _inside(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whether each target is in 0..width, and an index that is: [C] each."""
    return (targets >= 0) & (targets < width), targets.clamp(0, width - 1)


class _Chunks:
    """The products of hidden states and head, one chunk at a time in the same memory.

    A heap without such reuse, as on a CPU, grows by a chunk with each of them: small results stay between the chunks.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, tiles: Tiles, *, scratch: bool):
        self.hidden = hidden
        self.weight = weight
        size = min(tiles.tokens, len(hidden)) * tiles.vocabulary
        self.memory = hidden.new_empty(size)
        self.scratch = hidden.new_empty(size, dtype=_wide(hidden)) if scratch else None

    def products(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Return a chunk [C, W] and scratch memory of its shape, both of which the next call overwrites."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        out = self.memory[: shape[0] * shape[1]].view(shape)
        scratch = None if self.scratch is None else self.scratch[: out.numel()].view(shape)
        return torch.mm(self.hidden[rows], self.weight[columns].T, out=out), scratch


class _Sum:
    """A gradient as a sum of matrix products by rows.

    Args:
        of: Tensor whose gradient this is.
        dtype: Dtype of the sum; its factors may have another one.
        leaf: `of`, if the sum is to be added to its `grad`.
    """

    def __init__(self, of: Tensor, dtype: torch.dtype, leaf: Tensor | None = None):
        self.dtype = of.dtype
        self.leaf = leaf
        self.begun = leaf is not None and leaf.grad is not None
        if leaf is None:
            self.total = torch.empty_like(of, dtype=dtype)
        else:
            leaf.grad = self.total = torch.empty_like(of) if leaf.grad is None else leaf.grad

    def result(self) -> Tensor | None:
        """Return the sum in the dtype of its factors; None if it is in the leaf's `grad`."""
        return None if self.leaf is not None else self.total.to(self.dtype)

    def add_product(self, rows: slice, left: Tensor, right: Tensor, *, first: bool) -> None:
        """`total[rows] += left @ right`, or `=` for the first product.

        There is no temporary if the dtypes are equal, or the device can add products to a sum of another dtype.
        """
        total = self.total[rows]
        first = first and not self.begun
        beta = 0 if first else 1
        if total.dtype == right.dtype:
            total.addmm_(left, right, beta=beta)
        elif adds_products(total.device.type, right.dtype):
            torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, beta=beta, out=total)
        elif first:
            total.copy_(left @ right)
        else:
            total += left @ right


@cache
def adds_products(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch adds matrix products of 16 bits to a float32 sum on a device of this type."""
    total, factor = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, factor, factor, total.dtype, beta=1, out=total)
    # The operator is CUDA's alone, and no version says which dtypes it takes.
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)

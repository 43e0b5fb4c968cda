"""The varlen kernel is called for the same result as the buckets, in every version of its signature."""

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.model.attention import packed, varlen, varlen_kernel
from app.model.packing import Packing
from tests.model.support import siblings
from tests.model.test_packing import packing

HEADS = 6
KV_HEADS = 2
WIDTH = 8
LENGTHS = [5, 1, 9, 4]


def attention_by_loops(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal attention [T, H, D] from loops in float64."""
    out = torch.zeros_like(query)
    for start, end in pairwise(cu_seqlens.tolist()):
        for head in range(query.shape[1]):
            kv_head = head * key.shape[1] // query.shape[1]
            for token in range(start, end):
                weights = (key[start : token + 1, kv_head] @ query[token, head] * scale).softmax(0)
                out[token, head] = weights @ value[start : token + 1, kv_head]
    return out


def first_version(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
) -> Tensor:
    """The first signature in torch: no scale, no grouped heads."""
    assert is_causal
    assert max_q == max_k == max(LENGTHS)
    assert key.shape == value.shape == query.shape
    return attention_by_loops(query, key, value, cu_seq_q, query.shape[2] ** -0.5)


def later_version(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """The signature in torch 2.13."""
    assert window_size == (-1, 0)
    assert enable_gqa
    assert key.shape[1] == KV_HEADS
    return attention_by_loops(query, key, value, cu_seq_k, query.shape[2] ** -0.5 if scale is None else scale)


@pytest.mark.parametrize("kernel", [first_version, later_version])
@pytest.mark.parametrize("scaling", [None, 0.2])
def test_the_kernel_call_equals_the_buckets(kernel: Callable[..., Tensor], scaling: float | None) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query = torch.randn(1, HEADS, tokens, WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, 1, KV_HEADS, tokens, WIDTH, dtype=torch.float64)
    layout = packing(LENGTHS)
    bucketed, _ = packed(nn.Module(), query, key, value, None, packing=layout, scaling=scaling)
    by_kernel = varlen(kernel, query, key, value, layout, scaling)
    torch.testing.assert_close(by_kernel, bucketed.squeeze(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_shared_tokens_attend_and_get_gradients_as_if_every_sequence_had_its_own(by_kernel: bool) -> None:
    torch.manual_seed(0)
    layout = siblings(101).packing
    assert layout.full is not None
    tokens = layout.full.source  # of the sequences written out
    packed_tokens = int(tokens.max()) + 1
    assert packed_tokens < len(tokens)
    inputs = [torch.randn(1, heads, packed_tokens, WIDTH, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    ours = [each.clone().requires_grad_() for each in inputs]
    if by_kernel:
        mixed = varlen(later_version, ours[0], ours[1], ours[2], layout, None)
    else:
        mixed = packed(nn.Module(), ours[0], ours[1], ours[2], None, packing=layout)[0].squeeze(0)
    theirs = [each.clone().requires_grad_() for each in inputs]
    query, key, value = (each.squeeze(0).transpose(0, 1)[tokens] for each in theirs)
    written = attention_by_loops(query, key, value, layout.cu_seqlens, WIDTH**-0.5)
    torch.testing.assert_close(mixed[tokens], written, rtol=1e-12, atol=1e-12)

    # A loss reads the result of a shared token once.
    first = torch.tensor([tokens.tolist().index(token) for token in range(packed_tokens)])
    weights = torch.randn_like(mixed)
    (mixed * weights).sum().backward()
    (written[first] * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


def test_the_kernel_of_torch_has_this_signature() -> None:
    kernel = varlen_kernel()
    if kernel is None:
        pytest.skip("this torch has no varlen attention")
    theirs = list(inspect.signature(kernel).parameters)
    ours = list(inspect.signature(first_version).parameters)[:7]
    assert theirs[:7] == ours
    assert {"window_size", "is_causal"} & set(theirs)


@pytest.mark.parametrize("unsupported", [{"softcap": 50.0}, {"s_aux": torch.zeros(4)}])
def test_capped_scores_and_attention_sinks_are_refused(unsupported: dict[str, Any]) -> None:
    query = torch.zeros(1, 4, 6, 8)
    with pytest.raises(ValueError, match="softcap"):
        packed(nn.Module(), query, query, query, None, packing=packing([4, 2]), **unsupported)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_kernel_equals_the_buckets_on_a_device(width: int) -> None:
    """Forward and gradients in bfloat16, within its rounding error."""
    torch.manual_seed(0)
    kernel = varlen_kernel()
    assert kernel is not None
    layout = Packing.of(packing([700, 33, 1, 290]).boundaries, "cuda")
    random = [torch.randn(1, heads, 1024, width, device="cuda") for heads in (8, 2, 2)]
    q, k, v = inputs = [each.bfloat16().requires_grad_() for each in random]
    exact = [each.detach().float().requires_grad_() for each in inputs]
    fast = varlen(kernel, q, k, v, layout, None)
    slow, _ = packed(nn.Module(), exact[0], exact[1], exact[2], None, packing=layout)
    torch.testing.assert_close(fast.float(), slow.squeeze(0), rtol=2e-2, atol=2e-2)
    weights = torch.randn_like(slow)
    (fast * weights.squeeze(0).bfloat16()).sum().backward()
    (slow * weights).sum().backward()
    for one, other in zip(inputs, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=5e-2, atol=5e-2)

"""The varlen kernel is asked for what the buckets compute, whichever version of it torch has."""

import inspect
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from app.model.attention import packed, varlen, varlen_kernel
from tests.model.test_packing import packing

HEADS, GROUPS, WIDTH, LENGTHS = 6, 2, 8, [5, 1, 9, 4]


def plainly(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scale: float) -> Tensor:
    """[T, H, D] from loops in float64."""
    out = torch.zeros_like(query)
    for start, end in pairwise(borders.tolist()):
        for head in range(query.shape[1]):
            own = head * key.shape[1] // query.shape[1]
            for place in range(start, end):
                weights = (key[start : place + 1, own] @ query[place, head] * scale).softmax(0)
                out[place, head] = weights @ value[start : place + 1, own]
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
    """As torch had it first: no scale, no grouped heads."""
    assert is_causal
    assert max_q == max_k == max(LENGTHS)
    assert key.shape == value.shape == query.shape
    return plainly(query, key, value, cu_seq_q, query.shape[2] ** -0.5)


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
    """As torch 2.13 has it."""
    assert window_size == (-1, 0)
    assert enable_gqa
    assert key.shape[1] == GROUPS
    return plainly(query, key, value, cu_seq_k, query.shape[2] ** -0.5 if scale is None else scale)


@pytest.mark.parametrize("kernel", [first_version, later_version])
@pytest.mark.parametrize("scaling", [None, 0.2])
def test_the_kernel_is_asked_for_what_the_buckets_compute(kernel: Callable[..., Tensor], scaling: float | None) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query = torch.randn(1, HEADS, tokens, WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, 1, GROUPS, tokens, WIDTH, dtype=torch.float64)
    layout = packing(LENGTHS)
    bucketed, _ = packed(nn.Module(), query, key, value, None, packing=layout, scaling=scaling)
    asked = varlen(kernel, query, key, value, layout, scaling)
    torch.testing.assert_close(asked, bucketed.squeeze(0), rtol=1e-10, atol=1e-12)


def test_torchs_own_kernel_takes_these_arguments() -> None:
    kernel = varlen_kernel()
    if kernel is None:
        pytest.skip("this torch has no varlen attention")
    theirs = list(inspect.signature(kernel).parameters)
    ours = list(inspect.signature(first_version).parameters)[:7]
    assert theirs[:7] == ours
    assert {"window_size", "is_causal"} & set(theirs)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_kernel_equals_the_buckets_on_a_device(width: int) -> None:
    """Forward and gradients in bfloat16, within what bfloat16 rounds away."""
    torch.manual_seed(0)
    kernel = varlen_kernel()
    assert kernel is not None
    layout = packing([700, 33, 1, 290])
    made = [torch.randn(1, heads, 1024, width, device="cuda") for heads in (8, 2, 2)]
    inputs = [each.bfloat16().requires_grad_() for each in made]
    exact = [each.detach().float().requires_grad_() for each in inputs]
    layout = type(layout)(**{k: v.cuda() if isinstance(v, Tensor) else v for k, v in vars(layout).items()})
    fast = varlen(kernel, *inputs, layout, None)
    slow, _ = packed(nn.Module(), *exact, None, packing=layout)
    torch.testing.assert_close(fast.float(), slow.squeeze(0), rtol=2e-2, atol=2e-2)
    weights = torch.randn_like(slow)
    (fast * weights.squeeze(0).bfloat16()).sum().backward()
    (slow * weights).sum().backward()
    for one, other in zip(inputs, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=5e-2, atol=5e-2)

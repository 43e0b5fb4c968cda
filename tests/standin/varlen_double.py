"""torch's varlen attention where there is no flash kernel: by its definition, sequence after sequence, in float32.

`register("cpu")` (or "npu", the stand-in's) lets the branch that only accelerators take run in a test.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401 (defines the operators)

NAME = "torch_attn::_varlen_attn"


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[H, L, L] of one sequence, masked; q and k [H, L, D] float32."""
    scores = q @ k.transpose(1, 2) * scale
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)


def _sequences(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *more: Tensor) -> Any:
    """(q, k, v, …) of each sequence, [H, L, D] float32, key and value heads repeated; what a kernel asks is checked."""
    assert all(each.is_contiguous() for each in (q, k, v))
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16), q.dtype
    groups = q.shape[1] // k.shape[1]
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        of_keys = [each[c:d].float().transpose(0, 1).repeat_interleave(groups, 0) for each in (k, v)]
        yield q[a:b].float().transpose(0, 1), *of_keys, *(each[a:b].float().transpose(0, 1) for each in more)


def _scale(query: Tensor, scale: float | None, window: Any) -> float:
    assert tuple(window) == (-1, 0), "causal, without another window"
    return query.shape[-1] ** -0.5 if scale is None else scale


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: Any = None,
    window_size: Any = None,
    enable_gqa: bool = False,
    seqused_k: Any = None,
    block_table: Any = None,
    num_splits: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    longest = int((cu_seq_q[1:] - cu_seq_q[:-1]).max())
    assert max_q >= longest, (max_q, longest)
    factor = _scale(query, scale, window_size)
    outs, lses = [], []
    for q, k, v in _sequences(query, key, value, cu_seq_q, cu_seq_k):
        scores = _scores(q, k, factor)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
    rng = torch.zeros(2, dtype=torch.int64, device=query.device).view(torch.uint64)
    return torch.cat(outs).to(query.dtype), torch.cat(lses, dim=1), rng


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: Any = None,
    window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    factor = _scale(query, scale, window_size)
    groups = query.shape[1] // key.shape[1]
    found: tuple[list[Tensor], ...] = ([], [], [])
    for q, k, v, up in _sequences(query, key, value, cu_seq_q, cu_seq_k, grad_out):
        p = _scores(q, k, factor).softmax(-1)
        of_p = up @ v.transpose(1, 2)
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * factor
        whole = (of_scores @ k, of_scores.transpose(1, 2) @ q, p.transpose(1, 2) @ up)
        for each, to, repeated in zip(whole, found, (1, groups, groups), strict=True):
            to.append(each.unflatten(0, (-1, repeated)).sum(1).transpose(0, 1))
    return tuple(torch.cat(each).to(query.dtype).contiguous() for each in found)  # type: ignore[return-value]


def register(device: str) -> None:
    torch.library.register_kernel(NAME, device, forward)
    torch.library.register_kernel(NAME + "_backward", device, backward)

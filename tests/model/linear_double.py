"""Kernels of linear attention by definition: one sequence after the other, one token after the other, in float64."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from app.device.base import LinearKernels


def convolve(channels: Tensor, weight: Tensor, _: Tensor, host_cu_seqlens: Tensor, chunk_indices: Tensor) -> Tensor:
    require_chunks(host_cu_seqlens, chunk_indices)
    width, by_place = weight.shape[1], weight.double().T
    out = []
    for start, end in pairwise(host_cu_seqlens.tolist()):
        own = channels[0, start:end].double()
        before = torch.cat([own.new_zeros(width - 1, own.shape[1]), own])
        out += [(before[token : token + width] * by_place).sum(0) for token in range(end - start)]
    return silu(torch.stack(out))[None].to(channels.dtype)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    _: Tensor,
    host_cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> Tensor:
    require_chunks(host_cu_seqlens, chunk_indices)
    repeats = value.shape[2] // query.shape[2]
    q, k = (unit(tensor[0].double()).repeat_interleave(repeats, 1) for tensor in (query, key))
    v, strength = value[0].double(), beta[0].double()
    kept = decay[0].double().exp()

    out = []
    for start, end in pairwise(host_cu_seqlens.tolist()):
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for token in range(start, end):
            state = state * kept[token, :, None, None]
            error = v[token] - (state * k[token, :, :, None]).sum(1)
            state = state + k[token, :, :, None] * (strength[token, :, None] * error)[:, None]
            out.append((state * q[token, :, :, None]).sum(1) * q.shape[2] ** -0.5)
    return torch.stack(out)[None].to(value.dtype)


def require_chunks(host_cu_seqlens: Tensor, chunk_indices: Tensor) -> None:
    """The chunks of 64 tokens, one sequence after the other."""
    lengths = host_cu_seqlens.diff().tolist()
    chunks = [[sequence, place] for sequence, length in enumerate(lengths) for place in range(-(-length // 64))]
    assert chunk_indices.tolist() == chunks


def unit(rows: Tensor) -> Tensor:
    return rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()


DOUBLE = LinearKernels(convolve, delta_rule)

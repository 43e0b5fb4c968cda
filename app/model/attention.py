"""Attention that keeps packed sequences apart, under a name of its own in transformers' `AttentionInterface`.

`packed` runs torch's varlen kernel where there is one (16-bit, newer torch, not on a CPU), which takes the borders as
they are; elsewhere torch's causal scaled-dot-product attention on buckets of similar length: exact, on every device and
dtype, and the fastest on CPU. Linear attention (Qwen3.5's gated delta-net) must not see over a border either:
`isolate_sequences` runs such a mixer on the same buckets, which is right with any kernel, torch's reference included.
"""

import inspect
from collections.abc import Callable
from functools import cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from app.model.hf_import import transformers
from app.model.packing import Packing

PACKED = "packed"
VARLEN_DTYPES = (torch.bfloat16, torch.float16)


@cache
def register() -> None:
    """Make `packed` known to transformers. No mask is ever made for it: the borders say all."""
    transformers().AttentionInterface.register(PACKED, packed)
    transformers().AttentionMaskInterface.register(PACKED, _no_mask)


def packed(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,  # what transformers hands to every implementation
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence; [1, T, H, D]."""
    if sliding_window is not None and sliding_window < packing.longest:
        raise NotImplementedError(f"{PACKED} has no sliding window, and the model asks for {sliding_window}")
    if query.device.type != "cpu" and query.dtype in VARLEN_DTYPES and (kernel := varlen_kernel()) is not None:
        return varlen(kernel, query, key, value, packing, scaling).unsqueeze(0), None
    heads = query.shape[1]
    mixed = []
    padded = (packing.pad(tensor.squeeze(0).transpose(0, 1)) for tensor in (query, key, value))
    for parts in zip(*padded, strict=True):
        q, k, v = (part.transpose(1, 2) for part in parts)  # [B, heads, L, D]
        out = scaled_dot_product_attention(q, _repeat(k, heads), _repeat(v, heads), is_causal=True, scale=scaling)
        mixed.append(out.transpose(1, 2))
    return packing.unpad(mixed).unsqueeze(0), None


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """torch's varlen attention, where this torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def varlen(
    kernel: Callable[..., Any],
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    packing: Packing,
    scaling: float | None,
) -> Tensor:
    """Causal attention by the kernel, [T, H, D]. Its first version knew neither window, scale nor grouped heads."""
    knows = inspect.signature(kernel).parameters
    heads, width = query.shape[1], query.shape[3]
    if scaling is not None and "scale" not in knows:
        query = query * (scaling * sqrt(width))
    if "enable_gqa" not in knows:
        key, value = _repeat(key, heads), _repeat(value, heads)
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in knows else {"is_causal": True}
    options |= {"scale": scaling} if "scale" in knows else {}
    options |= {"enable_gqa": True} if "enable_gqa" in knows else {}
    q, k, v = (each.squeeze(0).transpose(0, 1).contiguous() for each in (query, key, value))
    borders = packing.cu_seqlens
    return kernel(q, k, v, borders, borders, packing.longest, packing.longest, **options)


def isolate_sequences(mixer: nn.Module) -> None:
    """Make a linear-attention module treat its packed input bucket by bucket (its parameters stay where they are)."""
    forward: Callable[..., Tensor] = mixer.forward

    def per_bucket(hidden_states: Tensor, *, packing: Packing, **_: Any) -> Tensor:
        mixed = [forward(hidden_states=bucket) for bucket in packing.pad(hidden_states.squeeze(0))]
        return packing.unpad(mixed).unsqueeze(0)

    mixer.forward = per_bucket


def _repeat(grouped: Tensor, heads: int) -> Tensor:
    """Key or value heads [B, K, L, D] → [B, H, L, D]: as fast as torch's `enable_gqa` on CPU; every kernel takes it."""
    batch, kept, length, width = grouped.shape
    if kept == heads:
        return grouped
    repeated = grouped[:, :, None].expand(batch, kept, heads // kept, length, width)
    return repeated.reshape(batch, heads, length, width)


def _no_mask(*_: Any, **__: Any) -> None:
    return None

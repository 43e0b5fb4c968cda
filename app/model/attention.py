"""Attention over packed sequences, registered as `packed` in transformers' `AttentionInterface`.

Full attention, in 16 bits on an accelerator: a kernel that takes the sequence boundaries directly, the device's own
(`Device.attention_kernel`) or torch's varlen kernel. Otherwise torch's causal scaled-dot-product attention on padded
buckets of similar length, which is exact on every device and dtype, and the fastest on a CPU.

Linear attention is in app/model/linear_attention.py.
"""

import inspect
from collections.abc import Callable, Sequence
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
# query [T, H, D], key and value [T, K, D], sequence boundaries, scale → [T, H, D]
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Sequence[int], float], Tensor]


@cache
def register_packed() -> None:
    """Register `packed` with transformers.

    It has no mask function: the sequence boundaries replace the mask, and transformers would read the positions from
    the device to look for sequences.
    """
    transformers().AttentionInterface.register(PACKED, packed)


def packed(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    attention_kernel: VarlenKernel | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,  # further arguments that transformers passes to every implementation
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence: [1, T, H, D].

    Raises:
        ValueError: If a sequence is longer than the model's sliding window, or the model caps its attention scores
            (`softcap`) or has attention sinks (`s_aux`), none of which is supported.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{PACKED} attention neither caps scores (softcap) nor has attention sinks (s_aux)")
    if sliding_window is not None and sliding_window < packing.longest:
        raise ValueError(
            f"{PACKED} attention has no sliding window: the window is {sliding_window} tokens, "
            f"the longest sequence {packing.longest}"
        )

    if query.device.type != "cpu" and query.dtype in VARLEN_DTYPES:
        if attention_kernel is not None:
            q, k, v = (_by_token(tensor) for tensor in (query, key, value))
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            return attention_kernel(q, k, v, packing.boundaries, scale).unsqueeze(0), None
        if (kernel := varlen_kernel()) is not None:
            return varlen(kernel, query, key, value, packing, scaling).unsqueeze(0), None

    heads = query.shape[1]
    mixed = []
    padded = (packing.pad(tensor.squeeze(0).transpose(0, 1)) for tensor in (query, key, value))
    for bucket in zip(*padded, strict=True):
        q, k, v = (tensor.transpose(1, 2) for tensor in bucket)  # [B, heads, L, D]
        out = scaled_dot_product_attention(q, _repeat(k, heads), _repeat(v, heads), is_causal=True, scale=scaling)
        mixed.append(out.transpose(1, 2))
    return packing.unpad(mixed).unsqueeze(0), None


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return torch's varlen attention, or None if this torch does not have it."""
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
    """Causal attention with the varlen kernel: [T, H, D].

    The kernel's first version had no window, scale or grouped heads, so its signature decides which arguments it gets.
    """
    accepted = inspect.signature(kernel).parameters
    options: dict[str, Any] = {}
    if "window_size" in accepted:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True

    if "scale" in accepted:
        options["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * sqrt(query.shape[3]))

    if "enable_gqa" in accepted:
        options["enable_gqa"] = True
    else:
        heads = query.shape[1]
        key = _repeat(key, heads)
        value = _repeat(value, heads)

    q, k, v = (_by_token(tensor) for tensor in (query, key, value))
    boundaries = packing.cu_seqlens
    return kernel(q, k, v, boundaries, boundaries, packing.longest, packing.longest, **options)


def _repeat(grouped: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads: [B, K, L, D] → [B, H, L, D].

    As fast as torch's `enable_gqa` on a CPU, and supported by every kernel.
    """
    batch, kv_heads, length, width = grouped.shape
    if kv_heads == heads:
        return grouped
    repeated = grouped[:, :, None].expand(batch, kv_heads, heads // kv_heads, length, width)
    return repeated.reshape(batch, heads, length, width)


def _by_token(tensor: Tensor) -> Tensor:
    """[1, H, T, D] → contiguous [T, H, D]."""
    return tensor.squeeze(0).transpose(0, 1).contiguous()

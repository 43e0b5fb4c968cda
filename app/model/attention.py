"""Attention over packed sequences, registered as `packed` in transformers' `AttentionInterface`.

Full attention, in 16 bits on an accelerator: a kernel that takes the sequence boundaries directly, the device's own
(`Device.attention_kernel`) or torch's varlen kernel. Otherwise torch's causal scaled-dot-product attention on padded
buckets of similar length, which is exact on every device and dtype, and the fastest on a CPU.

Linear attention (Qwen3.5's gated delta-nets): neither convolution nor state crosses a boundary. A device's kernels take
packed tokens with their boundaries; otherwise torch's convolution and the reference of transformers run on the buckets.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, scaled_dot_product_attention, silu, softplus

from app.device.base import LinearKernels
from app.model.hf_import import transformers
from app.model.packing import Packing

PACKED = "packed"
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
REFERENCE = "torch_chunk_gated_delta_rule"
SILU = ("silu", "swish")
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
            q, k, v = (packing.write_out(_by_token(tensor)) for tensor in (query, key, value))
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            out = attention_kernel(q, k, v, packing.boundaries, scale)
            return packing.take_back(out).unsqueeze(0), None
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

    q, k, v = (packing.write_out(_by_token(tensor)) for tensor in (query, key, value))
    boundaries = packing.cu_seqlens
    return packing.take_back(kernel(q, k, v, boundaries, boundaries, packing.longest, packing.longest, **options))


def mix_packed(mixer: nn.Module, kernels: LinearKernels | None) -> None:
    """Make a linear-attention module process packed sequences. Its parameters are unchanged."""
    module = sys.modules[type(mixer).__module__]
    known = all(hasattr(mixer, name) for name in PROJECTIONS) and getattr(mixer, "activation", None) in SILU
    if known and hasattr(module, REFERENCE):
        # Behind the decorator: with fla installed, transformers would call its kernels for tensors on a CPU, too.
        reference = inspect.unwrap(getattr(module, REFERENCE))
        _replace_forward(mixer, kernels, reference)
    else:
        _isolate_sequences(mixer)


def _replace_forward(mixer: Any, kernels: LinearKernels | None, reference: Callable[..., Any]) -> None:
    def forward(hidden_states: Tensor, *, packing: Packing, **_: Any) -> Tensor:
        qkv = mixer.in_proj_qkv(hidden_states)
        gate = mixer.in_proj_z(hidden_states)
        beta = mixer.in_proj_b(hidden_states).sigmoid()
        steps = softplus(mixer.in_proj_a(hidden_states).float() + mixer.dt_bias)
        decay = -mixer.A_log.float().exp() * steps

        if kernels is None:
            mixed = _mix_buckets(mixer, reference, packing, qkv, decay, beta)
        else:
            boundaries = (packing.cu_seqlens, packing.host_cu_seqlens)
            qkv, decay, beta = (packing.write_out(tensor.squeeze(0)).unsqueeze(0) for tensor in (qkv, decay, beta))
            convolved = kernels.convolve(qkv, mixer.conv1d.weight.squeeze(1), *boundaries)
            mixed = kernels.delta_rule(*_heads(mixer, convolved), decay, beta, *boundaries)
            mixed = packing.take_back(mixed.squeeze(0)).unsqueeze(0)

        # The gated norm is over the channels of a head.
        width = mixer.head_v_dim
        normed = mixer.norm(mixed.reshape(-1, width), gate.reshape(-1, width))
        return mixer.out_proj(normed.reshape(gate.shape))

    mixer.forward = forward


def _mix_buckets(
    mixer: Any, reference: Callable[..., Any], packing: Packing, qkv: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """Convolution and delta rule on padded buckets: [1, T, value heads, value width]."""
    mixed = []
    padded = (packing.pad(tensor.squeeze(0)) for tensor in (qkv, decay, beta))
    for channels, decays, betas in zip(*padded, strict=True):
        heads = _heads(mixer, _convolve(mixer.conv1d, channels))
        out, _ = reference(*heads, g=decays, beta=betas, use_qk_l2norm_in_kernel=True)
        mixed.append(out)
    return packing.unpad(mixed).unsqueeze(0)


def _convolve(convolution: nn.Conv1d, channels: Tensor) -> Tensor:
    """The causal convolution of [B, L, C] with its activation, in the weight's dtype."""
    weight = convolution.weight
    length, pad = channels.shape[1], weight.shape[2] - 1
    out = conv1d(
        channels.transpose(1, 2).to(weight.dtype), weight, convolution.bias, padding=pad, groups=weight.shape[0]
    )
    return silu(out[:, :, :length]).to(channels.dtype).transpose(1, 2)


def _heads(mixer: Any, channels: Tensor) -> tuple[Tensor, ...]:
    """[B, L, C] → query and key [B, L, value heads, key width], and value [B, L, value heads, value width]."""
    widths = (mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim)
    parts = channels.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True))

    repeats = mixer.num_v_heads // mixer.num_k_heads
    if repeats > 1:
        query, key = (tensor.repeat_interleave(repeats, dim=2) for tensor in (query, key))
    return query, key, value


def _isolate_sequences(mixer: nn.Module) -> None:
    """Make any other linear-attention module process its packed input bucket by bucket."""
    forward: Callable[..., Tensor] = mixer.forward

    def per_bucket(hidden_states: Tensor, *, packing: Packing, **_: Any) -> Tensor:
        mixed = [forward(hidden_states=bucket) for bucket in packing.pad(hidden_states.squeeze(0))]
        return packing.unpad(mixed).unsqueeze(0)

    mixer.forward = per_bucket


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

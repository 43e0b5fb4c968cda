"""Gated delta-net layers (Qwen3.5) over packed sequences: neither convolution nor state crosses a boundary.

    packed tokens ─→ projections ─→ convolution ─→ delta rule ─→ norm, output projection
                                    └─ a sequence alone ─┘

A device's kernels take packed tokens with their boundaries. Otherwise torch's convolution and the reference of
transformers run on padded buckets of sequences of similar length, which is exact on every device and dtype.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus

from app.device.base import LinearKernels
from app.model.packing import Packing

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
REFERENCE = "torch_chunk_gated_delta_rule"
SILU = ("silu", "swish")


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
            convolved = kernels.convolve(qkv, mixer.conv1d.weight.squeeze(1), *boundaries)
            mixed = kernels.delta_rule(*_heads(mixer, convolved), decay, beta, *boundaries)

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

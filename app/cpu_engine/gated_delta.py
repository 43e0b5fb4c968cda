"""Runs inside SGLang's processes: torch kernels of Qwen3.5's linear attention on CPU, in place of Triton kernels.

SGLang has the seven kernels of the gated delta-net for accelerators only. Each is replaced through SGLang's hook
registry by plain torch with the arithmetic of transformers' reference, so log-probabilities agree to float32 rounding.

    S ← S · exp(g) + (v − S·exp(g) · k) β kᵀ        out = S · q        (S: [V, K] for each value head)

T tokens of B requests are packed end to end; `query_start_loc` [B + 1] are their offsets. H key heads of width K serve
HV value heads of width V. `**_` swallows arguments for other devices.

Invariant: the state of a request (the last inputs of the convolution, the recurrent matrix) is read and written in
SGLang's own slots and layout. The state of a new request starts at zero.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

OPS = "sglang.kernels.ops."
KERNEL = "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel"
EPSILON = 1e-6  # in the norm of queries and keys, as in transformers


def register() -> None:
    """Register the replacements in SGLang's hook registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    replacements: dict[str, Any] = {
        OPS + "mamba.causal_conv1d_triton.causal_conv1d_fn": causal_conv1d_fn,
        OPS + "mamba.causal_conv1d_triton.causal_conv1d_update": causal_conv1d_update,
        OPS + "attention.linear.fused_gdn_gating.fused_gdn_gating": gating,
        OPS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous": split_projections,
        OPS + "elementwise.elementwise.fused_sigmoid_mul": gated_by_sigmoid,
        OPS + "attention.fla.layernorm_gated.rms_norm_gated": rms_norm_gated,
        KERNEL: delta_rule_kernel(),
    }
    for target, replacement in replacements.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Converts packed tokens to a padded batch and back."""

    lengths: Tensor  # [B] int64
    row: Tensor  # [T] int64, the request of each token
    column: Tensor  # [T] int64, its position in the request

    @classmethod
    def of(cls, query_start_loc: Tensor) -> "PackedLayout":
        """Return the layout from SGLang's cumulative lengths [B + 1]."""
        starts = query_start_loc.long()
        lengths = starts.diff()
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return cls(lengths, row, torch.arange(len(row)) - starts[row])

    def pad(self, packed: Tensor, before: int = 0) -> Tensor:
        """[T, …] → [B, before + L, …], with zeros before and after each request."""
        padded = packed.new_zeros(len(self.lengths), before + int(self.lengths.max()), *packed.shape[1:])
        padded[self.row, before + self.column] = packed[: len(self.row)]
        return padded


# --- the convolution over the last few inputs


def causal_conv1d_fn(
    x: Tensor,  # [D, T]
    weight: Tensor,  # [D, W]
    bias: Tensor | None,
    conv_states: Tensor,  # [slots, D, W - 1 or more], updated in place
    query_start_loc: Tensor,
    seq_lens_cpu: Any,
    cache_indices: Tensor,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    **_: Any,
) -> Tensor:
    """Convolve the new tokens of a prefill; returns [D, T]."""
    layout = PackedLayout.of(query_start_loc)
    width = weight.shape[1]
    slots = cache_indices[: len(layout.lengths)].long()
    before = conv_states[slots, :, 1 - width :].transpose(1, 2).to(x.dtype)  # [B, W - 1, D]
    if has_initial_state is not None:
        before = before * has_initial_state[: len(slots), None, None].to(x.dtype)

    inputs = layout.pad(x.T, before=width - 1)
    inputs[:, : width - 1] = before
    mixed = activated(conv1d(inputs.transpose(1, 2), weight.unsqueeze(1), bias, groups=len(x)), activation)

    last = layout.lengths[:, None] + torch.arange(width - 1)
    window = inputs[torch.arange(len(slots))[:, None], last]
    conv_states[slots, :, 1 - width :] = window.transpose(1, 2).to(conv_states.dtype)

    out = torch.zeros_like(x)
    out[:, : len(layout.row)] = mixed[layout.row, :, layout.column].T
    return out


def causal_conv1d_update(
    x: Tensor,  # [B, D]
    conv_state: Tensor,  # [slots, D, W - 1 or more], updated in place
    weight: Tensor,  # [D, W]
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Convolve one token of each request; returns [B, D]."""
    assert conv_state_indices is not None, "SGLang keeps the states of all requests in slots"
    width = weight.shape[1]
    slots = conv_state_indices[: len(x)].long()
    window = torch.cat([conv_state[slots, :, 1 - width :].to(x.dtype), x.unsqueeze(-1)], dim=-1)
    conv_state[slots, :, 1 - width :] = window[..., 1:].to(conv_state.dtype)

    mixed = (window.float() * weight.float()).sum(-1)
    if bias is not None:
        mixed = mixed + bias.float()
    return activated(mixed.to(x.dtype), activation)


def activated(x: Tensor, activation: str | bool | None) -> Tensor:
    """Apply SiLU where `activation` names it."""
    return silu(x) if activation in ("silu", "swish", True) else x


# --- before and after the recurrence


def gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Return the log-decay g and the step size β of each token, both [1, T, HV] float32, from `a` and `b` [T, HV]."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float(), beta, threshold)
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def split_projections(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T, q|k|v|z] and [T, b|a] → q|k|v, z [T, HV, V], b, a."""
    values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], dim=-1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=-1)
    return mixed_qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def gated_by_sigmoid(attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False) -> Tensor:
    """Apply the output gate of full attention."""
    return attn_output * torch.sigmoid(gate.reshape(attn_output.shape))


def rms_norm_gated(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """Multiply the RMS norm of `x` by the activated `z`, with the order of casts of transformers.

    Raises:
        ValueError: Another form than Qwen3.5's: an RMS norm over the whole width, then the gate.
    """
    if not (is_rms_norm and norm_before_gate and group_size is None and bias is None):
        raise ValueError("only Qwen3.5's gated norm is supported on CPU: RMS norm over the whole width, then the gate")
    wide = x.float()
    normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    if z is None:
        return normed
    gate = z.reshape(x.shape).float()
    return (normed * (torch.sigmoid(gate) if activation == "sigmoid" else silu(gate))).to(x.dtype)


# --- the recurrence


def decode_delta_rule(
    q: Tensor,  # [1, B, H, K]
    k: Tensor,  # [1, B, H, K]
    v: Tensor,  # [1, B, HV, V]
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,  # [slots, HV, V, K], updated in place
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Apply the delta rule to one token of each request; returns [1, B, HV, V]."""
    count = q.shape[1]
    heads_per_key = v.shape[2] // q.shape[2]
    slots = cache_indices[:count].long()
    decay, beta = gating(A_log, a.reshape(count, -1), b.reshape(count, -1), dt_bias)

    query = normalized(q[0]) * q.shape[-1] ** -0.5
    query = query.repeat_interleave(heads_per_key, 1).unsqueeze(-2)  # [B, HV, 1, K]
    key = normalized(k[0]).repeat_interleave(heads_per_key, 1).unsqueeze(-2)

    state = ssm_states[slots].float() * decay[0].exp()[..., None, None]
    change = (v[0].float() - (state * key).sum(-1)) * beta[0].unsqueeze(-1)
    state = state + change.unsqueeze(-1) * key
    ssm_states[slots] = state.to(ssm_states.dtype)
    return (state * query).sum(-1).to(v.dtype).unsqueeze(0)


def extend_delta_rule(
    q: Tensor,  # [1, T, H, K]
    k: Tensor,  # [1, T, H, K]
    v: Tensor,  # [1, T, HV, V]
    g: Tensor,  # [1, T, HV]
    beta: Tensor,  # [1, T, HV]
    *,
    ssm_states: Tensor,  # [slots, HV, V, K], updated in place
    cache_indices: Tensor,
    query_start_loc: Tensor,
    inplace_update: bool = True,
    extend_prefix_lens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Apply the delta rule to a prefill, by transformers' chunked reference; returns [1, T, HV, V]."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    layout = PackedLayout.of(query_start_loc)
    heads_per_key = v.shape[2] // q.shape[2]
    slots = cache_indices[: len(layout.lengths)].long()
    state = ssm_states[slots].float().transpose(-1, -2)  # transformers keeps [K, V]
    if extend_prefix_lens is not None:
        state = state * (extend_prefix_lens[: len(slots)] > 0)[:, None, None, None]

    mixed, state = torch_chunk_gated_delta_rule(
        layout.pad(q[0]).repeat_interleave(heads_per_key, 2),
        layout.pad(k[0]).repeat_interleave(heads_per_key, 2),
        *(layout.pad(each[0]) for each in (v, g, beta)),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    if inplace_update:
        ssm_states[slots] = state.transpose(-1, -2).to(ssm_states.dtype)

    out = torch.zeros_like(v)
    out[0, : len(layout.row)] = mixed[layout.row, layout.column].to(v.dtype)
    return out, None, None


def delta_rule_kernel() -> type:
    """Return both functions as SGLang's kernel class, whose base class can be imported only in a server's process."""
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

    class TorchGDNKernel(LinearAttnKernelBase):
        supports_packed_decode = False
        decode = staticmethod(decode_delta_rule)
        extend = staticmethod(extend_delta_rule)

    return TorchGDNKernel


def normalized(x: Tensor) -> Tensor:
    """Scale the last axis to unit length, in float32."""
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + EPSILON)

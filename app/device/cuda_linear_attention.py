"""Kernels of flash-linear-attention that train gated delta-nets on packed sequences.

One call takes all sequences of a microbatch, as one row with boundaries: no padding, and one compilation for any number
of them. The boundaries come from the host too, where the kernels' grids are computed.
"""

from typing import TYPE_CHECKING

from app.device.base import LinearKernels

if TYPE_CHECKING:
    from torch import Tensor


def convolve(channels: "Tensor", weight: "Tensor", cu_seqlens: "Tensor", host_cu_seqlens: "Tensor") -> "Tensor":
    """Causal convolution with SiLU of [1, T, C] by [C, W], each sequence alone."""
    from fla.modules.causal_conv1d import causal_conv1d

    out, _ = causal_conv1d(channels, weight, activation="silu", cu_seqlens=cu_seqlens, cu_seqlens_cpu=host_cu_seqlens)
    return out


def delta_rule(
    query: "Tensor",  # [1, T, H, K]
    key: "Tensor",  # [1, T, H, K]
    value: "Tensor",  # [1, T, H, V]
    decay: "Tensor",  # [1, T, H], logarithms
    beta: "Tensor",  # [1, T, H]
    cu_seqlens: "Tensor",
    host_cu_seqlens: "Tensor",
) -> "Tensor":
    """The gated delta rule on normalized queries and keys, each sequence alone: [1, T, H, V]."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = chunk_gated_delta_rule(
        query,
        key,
        value,
        g=decay,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=host_cu_seqlens,
    )
    return out


KERNELS = LinearKernels(convolve, delta_rule)

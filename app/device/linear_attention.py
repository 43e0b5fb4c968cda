"""Kernels of linear attention for CUDA and NPU, from fla-core, which flash-linear-attention brings.

They take all sequences of a microbatch in one call, as one row with boundaries: no padding, and one compilation for any
number of them. The boundaries come from the host too, where the kernels' grids are computed, and so do the chunks: made
from the boundaries by fla, they would be copied to the device in a call that waits for it.
"""

from typing import TYPE_CHECKING

from app.device.base import LinearKernels

if TYPE_CHECKING:
    from torch import Tensor


def convolve(
    channels: "Tensor", weight: "Tensor", cu_seqlens: "Tensor", host_cu_seqlens: "Tensor", chunk_indices: "Tensor"
) -> "Tensor":
    """Causal convolution with SiLU of [1, T, C] by [C, W], each sequence alone."""
    from fla.modules.causal_conv1d import causal_conv1d

    out, _ = causal_conv1d(
        channels,
        weight,
        activation="silu",
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=host_cu_seqlens,
        chunk_indices=chunk_indices,
    )
    return out


def delta_rule(
    query: "Tensor",  # [1, T, H, K]
    key: "Tensor",  # [1, T, H, K]
    value: "Tensor",  # [1, T, HV, V], HV a multiple of H
    decay: "Tensor",  # [1, T, HV], logarithms
    beta: "Tensor",  # [1, T, HV]
    cu_seqlens: "Tensor",
    host_cu_seqlens: "Tensor",
    chunk_indices: "Tensor",
) -> "Tensor":
    """The gated delta rule on normalized queries and keys, each sequence alone: [1, T, HV, V]."""
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
        chunk_indices=chunk_indices,
    )
    return out


KERNELS = LinearKernels(convolve, delta_rule)

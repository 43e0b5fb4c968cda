"""Runs inside SGLang's processes: norms, rotary embedding and SiLU with fewer torch operators than SGLang's on a CPU.

In a decode step a small operator costs its call rather than its numbers. SGLang's platform interface lets a platform
replace the operators of its layers; for other types than plain float32 and bfloat16, SGLang's operators run. In
bfloat16 they round where SGLang's do.
"""

import logging
import pkgutil
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the operators for our platform, except those that this SGLang lacks or calls with other arguments."""
    from sglang.kernels.fused_op import BaseFusedOp

    from app.rollout.engine.sglang_plugin.platform import NATIVE

    layers = "sglang.srt.layers."
    operators: dict[str, Callable[..., Any]] = {
        layers + "layernorm.RMSNorm": rms_norm,
        layers + "layernorm.GemmaRMSNorm": gemma_rms_norm,
        layers + "activation.SiluAndMul": silu_and_mul,
        layers + "rotary_embedding.base.RotaryEmbedding": rotary_embedding,
    }
    for name, operator in operators.items():
        if callable_alike(f"{name}.forward_native", operator):
            BaseFusedOp.register_oot_forward(pkgutil.resolve_name(name), operator, NATIVE)


def callable_alike(name: str, replacement: Callable[..., Any], before: int = 0) -> bool:
    """Return whether this SGLang has the method `name` and calls it with the arguments that its replacement takes.

    Args:
        name: Dotted.
        replacement: With the method's parameters.
        before: How many parameters it takes before those.
    """
    try:
        replaced = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        logger.warning("SGLang has no %s: not replaced", name)
        return False
    alike = list(signature(replacement).parameters)[before + 1 :] == list(signature(replaced).parameters)[1:]
    if not alike:
        logger.warning("SGLang calls %s differently: not replaced", name)
    return alike


# --- SGLang's layers


def rms_norm(
    layer: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize x, or x + residual, which is returned as well."""
    if not plain_norm(layer) or not of_one_dtype(layer.weight, x, residual, post_residual_addition):
        return layer.forward_native(x, residual, post_residual_addition, quant_linear)
    normed, total = normalized_sum(x, residual, post_residual_addition, layer.weight, layer.variance_epsilon)
    return normed if residual is None else (normed, total)


def gemma_rms_norm(
    layer: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize as `rms_norm`, with a weight that is one larger than its parameter."""
    if x.dtype != torch.float32 or not of_one_dtype(layer.weight, x, residual, post_residual_addition):
        return layer.forward_native(x, residual, post_residual_addition)
    normed, total = normalized_sum(x, residual, post_residual_addition, 1.0 + layer.weight, layer.variance_epsilon)
    return normed if residual is None else (normed, total)


def silu_and_mul(layer: Any, x: Tensor) -> Tensor:
    """Return silu(gate) · up of x [T, 2 · width], gate and up side by side."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def rotary_embedding(
    layer: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    """Rotate query [T, H·D] and key [T, K·D]."""
    plain = plain_rotary(layer) and offsets is None and fused_set_kv_buffer_arg is None
    if not plain or not of_one_dtype(layer.cos_sin_cache, query, key):
        return layer.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    cos, sin = cos_and_sin(layer.cos_sin_cache, positions.flatten())

    def rotate(x: Tensor) -> Tensor:
        return rotated(x.view(len(cos), -1, layer.head_size), cos, sin).view(x.shape)

    return rotate(query), rotate(key)


def plain_norm(layer: Any) -> bool:
    """Return whether a layer is RMSNorm over all of the last dimension, rounded once."""
    return (
        layer.variance_size_override is None and not layer.cast_x_before_out_mul and layer.override_orig_dtype is None
    )


def plain_rotary(layer: Any) -> bool:
    """Return whether a layer rotates whole heads by halves."""
    return layer.is_neox_style and layer.rotary_dim == layer.head_size and not hasattr(layer, "sin_cos_cache")


def of_one_dtype(*tensors: Tensor | None) -> bool:
    """Return whether all tensors that there are have the same dtype, float32 or bfloat16."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return dtypes in ({torch.float32}, {torch.bfloat16})


# --- on tensors


def normalized_sum(
    x: Tensor, residual: Tensor | None, addition: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of x + residual + addition, and that sum; computed in float32, each rounded to x's dtype."""
    total = x.float()
    for each in (residual, addition):
        total = total if each is None else total + each
    normed = torch.rms_norm(total, weight.shape, weight.float(), epsilon)
    return normed.to(x.dtype), total.to(x.dtype)


def cos_and_sin(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a rotation for `rotated`.

    Args:
        table: [P, D], cosines and sines of each position, D/2 each.
        positions: [T].

    Returns:
        Cosines and signed sines, each [T, 1, D].
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [T, H, D] rotated by what `cos_and_sin` returned."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).add_(swapped.mul_(sin))

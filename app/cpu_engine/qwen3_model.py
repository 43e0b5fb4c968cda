"""Runs inside SGLang's processes: Qwen3 as one function over tensors, in place of some ten modules a layer.

SGLang's modules ask for parallel groups, quantization, adapters and kernels of accelerators in each call; on a CPU that
took a tenth of a decode step of 38 requests (6 layers, 256 wide). A model with any of these stays SGLang's: parallel
ranks, adapters, quantized or half-precision weights, biases, scaled rotary embeddings, hooks, captured layers.

Invariant: only modules are kept, and their weights are looked up in each pass, so new weights count at once.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import silu

from app.cpu_engine.matmul import linear
from app.cpu_engine.operators import callable_alike, cos_and_sin, plain_norm, plain_rotary, rotated

logger = logging.getLogger(__name__)

FORWARD = "sglang.srt.models.qwen3.Qwen3Model.forward"


def register() -> None:
    """Register the replacement of the model's forward pass."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if callable_alike(FORWARD, forward, before=1):
        HookRegistry.register(FORWARD, forward, HookType.AROUND)


_plain: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # by model; its modules stay once it serves


def forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    input_embeds: Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """Return the hidden states of a decode step after the last norm, [T, hidden]."""
    if not forward_batch.forward_mode.is_decode() or input_embeds is not None or model.layers_to_capture:
        return original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    if model not in _plain:
        _plain[model] = is_plain(model)
    if not _plain[model]:
        return original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)

    hidden = model.embed_tokens(input_ids)
    rotary = model.layers[0].self_attn.rotary_emb
    turn = cos_and_sin(rotary.cos_sin_cache, positions)
    added = None
    for layer in model.layers:
        hidden, added = decoder_layer(layer, hidden, added, turn, forward_batch)
    return normalized(model.norm, hidden + added)


def decoder_layer(
    layer: Any, hidden: Tensor, added: Tensor | None, turn: tuple[Tensor, Tensor], forward_batch: Any
) -> tuple[Tensor, Tensor]:
    """Run one layer.

    Args:
        layer: SGLang's layer.
        hidden: [T, hidden], the residual stream.
        added: [T, hidden], the output of the layer before, to be added; None before the first.
        turn: What `cos_and_sin` returned.
        forward_batch: SGLang's batch.

    Returns:
        The residual stream and the layer's output.
    """
    attention = layer.self_attn
    hidden = hidden if added is None else hidden + added
    projected = linear(normalized(layer.input_layernorm, hidden), attention.qkv_proj.weight)
    mixed = attention.attn(*queries_keys_values(attention, projected, turn), forward_batch)

    hidden = hidden + linear(mixed, attention.o_proj.weight)
    gate, up = linear(normalized(layer.post_attention_layernorm, hidden), layer.mlp.gate_up_proj.weight).chunk(2, -1)
    return hidden, linear(silu(gate).mul_(up), layer.mlp.down_proj.weight)


def queries_keys_values(
    attention: Any, projected: Tensor, turn: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [T, H·D], keys [T, K·D] and values [T, K·D] of a projection [T, (H + 2K)·D]."""
    key_heads = attention.num_kv_heads
    heads = projected.view(len(projected), -1, attention.head_dim)
    both, values = heads.split([attention.num_heads + key_heads, key_heads], dim=1)

    normed = torch.rms_norm(both, (attention.head_dim,), None, attention.q_norm.variance_epsilon)
    queries, keys = normed.split([attention.num_heads, key_heads], dim=1)
    queries.mul_(attention.q_norm.weight)
    keys.mul_(attention.k_norm.weight)

    queries, keys = rotated(normed, *turn).split([attention.num_heads, key_heads], dim=1)
    return queries.flatten(1), keys.flatten(1), values.flatten(1)


def normalized(norm: Any, x: Tensor) -> Tensor:
    """Apply SGLang's RMSNorm."""
    return torch.rms_norm(x, (norm.hidden_size,), norm.weight, norm.variance_epsilon)


# --- which models


def is_plain(model: Any) -> bool:
    """Return whether a model computes what is written here: see the module."""
    from sglang.srt.models.qwen3 import Qwen3Model
    from sglang.srt.runtime_context import get_parallel

    try:
        return (
            type(model) is Qwen3Model
            and get_parallel().tp_size == get_parallel().pp_size == 1
            and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            and all(parameter.dtype == torch.float32 for parameter in model.parameters())
            and all(plain_attention(layer.self_attn) and plain_mlp(layer.mlp) for layer in model.layers)
            and all(map(plain_rms_norm, (model.norm, *each_norm(model))))
        )
    except AttributeError as missing:
        logger.warning("This SGLang's Qwen3 is another one and runs as it is: %s", missing)
        return False


def each_norm(model: Any) -> Iterator[Any]:
    """Yield the norms of a model's layers."""
    for layer in model.layers:
        attention = layer.self_attn
        yield from (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)


def plain_rms_norm(norm: Any) -> bool:
    """Return whether a norm is SGLang's RMSNorm in float32."""
    from sglang.srt.layers.layernorm import RMSNorm

    return type(norm) is RMSNorm and plain_norm(norm)


def plain_attention(attention: Any) -> bool:
    """Return whether an attention has plain linear layers and a plain rotary embedding."""
    from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.models.qwen3 import Qwen3Attention

    return (
        type(attention) is Qwen3Attention
        and plain_linear(attention.qkv_proj, QKVParallelLinear)
        and plain_linear(attention.o_proj, RowParallelLinear)
        and attention.q_norm.variance_epsilon == attention.k_norm.variance_epsilon
        and type(attention.rotary_emb) is RotaryEmbedding
        and plain_rotary(attention.rotary_emb)
    )


def plain_mlp(mlp: Any) -> bool:
    """Return whether an MLP is silu(gate) · up between plain linear layers."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear

    return (
        type(mlp.act_fn) is SiluAndMul
        and plain_linear(mlp.gate_up_proj, MergedColumnParallelLinear)
        and plain_linear(mlp.down_proj, RowParallelLinear)
    )


def plain_linear(module: Any, kind: type) -> bool:
    """Return whether a linear layer is of SGLang's class `kind` (an adapter wraps it), unquantized, without a bias."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    is_kind: bool = type(module) is kind
    return is_kind and type(module.quant_method) is UnquantizedLinearMethod and module.bias is None

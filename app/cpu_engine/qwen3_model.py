"""Runs inside SGLang's processes: Qwen3 as one function over tensors, in place of some ten modules a layer.

SGLang's modules ask for parallel groups, quantization, adapters and kernels of accelerators in each call; on a CPU that
took a tenth of a decode step of 38 requests (6 layers, 256 wide). A model with any of these stays SGLang's: parallel
ranks, adapters, quantized or half-precision weights, biases, scaled rotary embeddings, hooks, captured layers.

Invariant: only modules are kept, and their weights are looked up in each pass, so new weights count at once.
"""

import logging
from collections.abc import Callable
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
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.runtime_context import get_parallel

    modules = list(model.modules())
    linear = [module for module in modules if isinstance(module, LinearBase)]
    attentions = [layer.self_attn for layer in model.layers]
    try:
        return (
            get_parallel().tp_size == get_parallel().pp_size == 1
            and {type(module) for module in modules} <= plain_types()
            and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
            and all(parameter.dtype == torch.float32 for parameter in model.parameters())
            and all(type(each.quant_method) is UnquantizedLinearMethod and each.bias is None for each in linear)
            and all(plain_norm(module) for module in modules if hasattr(module, "variance_epsilon"))
            and all(plain_rotary(each.rotary_emb) for each in attentions)
            and all(each.q_norm.variance_epsilon == each.k_norm.variance_epsilon for each in attentions)
        )
    except AttributeError as missing:
        logger.warning("This SGLang's Qwen3 is another one and runs as it is: %s", missing)
        return False


def plain_types() -> set[type]:
    """Return the classes of the modules of such a model. An adapter wraps a linear layer in a class of its own."""
    from sglang.srt.layers import activation, layernorm, linear, radix_attention, vocab_parallel_embedding
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.models import qwen3

    return {
        *(qwen3.Qwen3Model, qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen3.Qwen3MLP, torch.nn.ModuleList),
        *(linear.QKVParallelLinear, linear.RowParallelLinear, linear.MergedColumnParallelLinear),
        *(vocab_parallel_embedding.VocabParallelEmbedding, radix_attention.RadixAttention, RotaryEmbedding),
        *(layernorm.RMSNorm, activation.SiluAndMul),
    }

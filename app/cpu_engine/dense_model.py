"""Runs inside SGLang's processes: dense models as one function over tensors, in place of some ten modules a layer.

SGLang's modules ask for parallel groups, quantization, adapters and kernels of accelerators in each call; on a CPU that
took a tenth of a decode step of 38 requests (6 layers, 256 wide). SGLang describes these families by the same modules;
biases, and norms of queries and keys, are optional. A model with anything else keeps SGLang's forward pass: parallel
ranks, adapters, quantized weights, scaled rotary embeddings, hooks, captured layers.

Invariants:
    - Only modules are kept, and their weights are looked up in each pass, so new weights take effect at once.
    - In bfloat16 everything is rounded where SGLang's modules round it.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import silu

from app.cpu_engine import operators
from app.cpu_engine.matmul import linear

logger = logging.getLogger(__name__)

MODELS = "sglang.srt.models."
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # module → prefix of its classes
PARTS = ("Model", "DecoderLayer", "Attention", "MLP")


def register() -> None:
    """Register the replacement of each family's forward pass."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for module, prefix in FAMILIES.items():
        target = f"{MODELS}{module}.{prefix}Model.forward"
        if operators.callable_alike(target, forward, before=1):
            HookRegistry.register(target, forward, HookType.AROUND)


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

    turn = operators.cos_and_sin(model.layers[0].self_attn.rotary_emb.cos_sin_cache, positions)
    hidden, residual = model.embed_tokens(input_ids), None
    for layer in model.layers:
        hidden, residual = decoder_layer(layer, hidden, residual, turn, forward_batch)
    return normalized(model.norm, hidden, residual)[0]


def decoder_layer(
    layer: Any, hidden: Tensor, residual: Tensor | None, turn: tuple[Tensor, Tensor], forward_batch: Any
) -> tuple[Tensor, Tensor]:
    """Run one layer.

    Args:
        hidden: [T, hidden], the output of the layer before, or the embeddings.
        residual: [T, hidden], to which `hidden` is added; None before the first layer.
        turn: What `operators.cos_and_sin` returned.

    Returns:
        The layer's output and the residual to which it is added.
    """
    attention, mlp = layer.self_attn, layer.mlp
    hidden, residual = normalized(layer.input_layernorm, hidden, residual)
    mixed = attention.attn(*queries_keys_values(attention, projected(attention.qkv_proj, hidden), turn), forward_batch)

    hidden, residual = normalized(layer.post_attention_layernorm, projected(attention.o_proj, mixed), residual)
    gate, up = projected(mlp.gate_up_proj, hidden).chunk(2, -1)
    return projected(mlp.down_proj, silu(gate).mul_(up)), residual


def queries_keys_values(attention: Any, qkv: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [T, H·D], keys [T, K·D] and values [T, K·D] of a projection [T, (H + 2K)·D]."""
    counts = [attention.num_heads, attention.num_kv_heads]
    both, values = qkv.view(len(qkv), -1, attention.head_dim).split([sum(counts), counts[1]], dim=1)

    if hasattr(attention, "q_norm"):
        both = torch.rms_norm(both.float(), (attention.head_dim,), None, attention.q_norm.variance_epsilon)
        queries, keys = both.split(counts, dim=1)
        queries.mul_(attention.q_norm.weight)
        keys.mul_(attention.k_norm.weight)

    queries, keys = operators.rotated(both.to(qkv.dtype), *turn).split(counts, dim=1)
    return queries.flatten(1), keys.flatten(1), values.flatten(1)


def normalized(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Apply SGLang's RMSNorm to the sum, which is returned as well."""
    return operators.normalized_sum(x, residual, None, norm.weight, norm.variance_epsilon)


def projected(layer: Any, x: Tensor) -> Tensor:
    """Apply one of SGLang's linear layers."""
    return linear(x, layer.weight, layer.bias)


# --- which models


def is_plain(model: Any) -> bool:
    """Return whether a model computes what is written here: see the module."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.runtime_context import get_parallel

    modules = list(model.modules())
    linear = [module for module in modules if isinstance(module, LinearBase)]
    attentions = [layer.self_attn for layer in model.layers]
    normed = [attention for attention in attentions if hasattr(attention, "q_norm")]
    try:
        return (
            get_parallel().tp_size == get_parallel().pp_size == 1
            and {type(module) for module in modules} <= plain_types()
            and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
            and operators.of_one_dtype(*model.parameters(), *(each.rotary_emb.cos_sin_cache for each in attentions))
            and all(type(each.quant_method) is UnquantizedLinearMethod and not each.skip_bias_add for each in linear)
            and all(operators.plain_norm(module) for module in modules if hasattr(module, "variance_epsilon"))
            and all(operators.plain_rotary(each.rotary_emb) for each in attentions)
            and all(each.q_norm.variance_epsilon == each.k_norm.variance_epsilon for each in normed)
        )
    except AttributeError as missing:
        logger.warning("This SGLang's %s is another one and runs as it is: %s", type(model).__name__, missing)
        return False


def plain_types() -> set[type]:
    """Return the classes of the modules of such a model. An adapter wraps a linear layer in a class of its own."""
    from sglang.srt.layers import activation, layernorm, linear, radix_attention, vocab_parallel_embedding
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    families = {importlib.import_module(MODELS + module): prefix for module, prefix in FAMILIES.items()}
    return {
        *(getattr(module, prefix + part) for module, prefix in families.items() for part in PARTS),
        *(linear.QKVParallelLinear, linear.RowParallelLinear, linear.MergedColumnParallelLinear),
        *(vocab_parallel_embedding.VocabParallelEmbedding, radix_attention.RadixAttention, RotaryEmbedding),
        *(layernorm.RMSNorm, activation.SiluAndMul, torch.nn.ModuleList),
    }

"""Counts the parameters of adapters from a model's shapes, without torch."""

from collections.abc import Mapping

from app.config.model import ALL_LINEAR, LoraConfig
from app.model.architecture import Architecture

Shapes = Mapping[str, tuple[int, int]]  # layer → (features in, features out)


def adapter_parameters(model: Architecture, lora: LoraConfig) -> int:
    """Return the number of parameters of all adapters: rank · (in + out) of each adapted layer."""
    linear_layers = model.layers - model.full_layers
    full, linear = (_features(shapes, lora) for shapes in (_full_attention(model), _linear_attention(model)))
    mlp = _features(_mlp(model), lora)
    return lora.rank * (model.full_layers * full + linear_layers * linear + model.layers * mlp)


def trained_parameters(model: Architecture, lora: LoraConfig) -> int:
    """Return the number of parameters that a run trains: those of the adapters, or without them all."""
    return adapter_parameters(model, lora) if lora.enabled else model.parameters


def layer_names(model: Architecture) -> set[str]:
    """Return the names of the linear layers that can have adapters."""
    return {*_full_attention(model), *_linear_attention(model), *_mlp(model)}


def _features(shapes: Shapes, lora: LoraConfig) -> int:
    chosen = shapes if lora.targets == [ALL_LINEAR] else [name for name in shapes if name in lora.targets]
    return sum(sum(shapes[name]) for name in chosen)


def _full_attention(model: Architecture) -> Shapes:
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    queries = width if model.linear is None else 2 * width  # with an output gate
    return {
        "q_proj": (model.hidden, queries),
        "k_proj": (model.hidden, kv_width),
        "v_proj": (model.hidden, kv_width),
        "o_proj": (width, model.hidden),
    }


def _linear_attention(model: Architecture) -> Shapes:
    mixer = model.linear
    if mixer is None:
        return {}
    return {
        "in_proj_qkv": (model.hidden, mixer.channels),
        "in_proj_z": (model.hidden, mixer.value_channels),
        "out_proj": (mixer.value_channels, model.hidden),
    }


def _mlp(model: Architecture) -> Shapes:
    up = (model.hidden, model.ffn)
    return {"gate_proj": up, "up_proj": up, "down_proj": (model.ffn, model.hidden)}

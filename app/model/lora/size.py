"""Counts the parameters of adapters from a model's shapes. Imports no torch: `mode=plan` uses it."""

from app.config.model import ALL_LINEAR, LoraConfig
from app.model.architecture import Architecture

Shapes = dict[str, tuple[int, int]]  # name of a linear layer → inputs, outputs


def adapter_parameters(model: Architecture, lora: LoraConfig) -> int:
    """Return the parameters of all adapters: rank × (inputs + outputs) of every targeted linear layer."""
    linear_layers = model.layers - model.full_layers
    full = _targeted(full_attention(model), lora)
    linear = _targeted(linear_attention(model), lora) if linear_layers else 0
    return lora.rank * (model.full_layers * full + linear_layers * linear)


def _targeted(shapes: Shapes, lora: LoraConfig) -> int:
    all_linear = ALL_LINEAR in lora.targets
    return sum(inputs + outputs for name, (inputs, outputs) in shapes.items() if all_linear or name in lora.targets)


def full_attention(model: Architecture) -> Shapes:
    """Return the linear layers of a decoder layer with full attention."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    gated = width if model.linear is not None else 0  # queries come with an output gate
    return {
        "q_proj": (model.hidden, width + gated),
        "k_proj": (model.hidden, kv_width),
        "v_proj": (model.hidden, kv_width),
        "o_proj": (width, model.hidden),
        **_mlp(model),
    }


def linear_attention(model: Architecture) -> Shapes:
    """Return the linear layers of a decoder layer with linear attention, without its decays."""
    assert model.linear is not None
    return {
        "in_proj_qkv": (model.hidden, model.linear.channels),
        "in_proj_z": (model.hidden, model.linear.value_channels),
        "out_proj": (model.linear.value_channels, model.hidden),
        **_mlp(model),
    }


def _mlp(model: Architecture) -> Shapes:
    return {
        "gate_proj": (model.hidden, model.ffn),
        "up_proj": (model.hidden, model.ffn),
        "down_proj": (model.ffn, model.hidden),
    }

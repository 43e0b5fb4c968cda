"""Counts the parameters of adapters from a model's shapes, without torch."""

from app.config.model import ALL_LINEAR, LoraConfig
from app.model.architecture import Architecture, Shapes


def adapter_parameters(model: Architecture, lora: LoraConfig) -> int:
    """Return the number of parameters of all adapters: rank · (in + out) of each adapted layer."""
    full, linear, mlp = (
        _features(shapes, lora) for shapes in (model.full_attention, model.linear_attention, model.mlp)
    )
    linear_layers = model.layers - model.full_layers
    return lora.rank * (model.full_layers * full + linear_layers * linear + model.layers * mlp)


def trained_parameters(model: Architecture, lora: LoraConfig) -> int:
    """Return the number of parameters that a run trains: those of the adapters, or without them all."""
    return adapter_parameters(model, lora) if lora.enabled else model.parameters


def layer_names(model: Architecture) -> set[str]:
    """Return the names of the linear layers that can have adapters."""
    return {*model.full_attention, *model.linear_attention, *model.mlp}


def _features(shapes: Shapes, lora: LoraConfig) -> int:
    chosen = shapes if lora.targets == [ALL_LINEAR] else [name for name in shapes if name in lora.targets]
    return sum(sum(shapes[name]) for name in chosen)

"""Merges adapters into the weights of their base model, for exports."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from app.errors import RunError
from app.model.hf_checkpoint import open_checkpoint, stored_name
from app.model.lora.names import module_of


def merged(source: Path, adapters: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, W + scale · B A) of every adapted weight, in float32 and one at a time.

    Whoever stores them in bfloat16 rounds them once. A change below half a step of bfloat16's grid is lost by that,
    which is why engines get the adapters themselves while a run trains.

    Args:
        source: Directory of the base model.
        adapters: A [r, in] and B [out, r] by PEFT's names.
        scale: Factor of the product.

    Raises:
        RunError: The base has no weight of an adapter's name.
    """
    with open_checkpoint(source) as base:
        for layer, (a, b) in pairs(adapters).items():
            name = stored_name(f"{layer}.weight", base.names)
            if name is None:
                raise RunError(f"export: {source} has no tensor named {layer}.weight")
            yield name, base.read(name).to(torch.float32) + delta(a, b, scale)


def delta(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return what an adapter adds to its layer's weight: `scale · B A` [out, in] float32."""
    return scale * (b.to(torch.float32) @ a.to(torch.float32))


def pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (A, B) of every adapted layer, by the layer's name. `tensors` have PEFT's names."""
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, parameter = module_of(name)
        by_layer.setdefault(layer, {})[parameter] = tensor
    return {layer: (both["lora_A"], both["lora_B"]) for layer, both in by_layer.items()}

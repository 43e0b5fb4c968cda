"""How far the adapters are from the base model: the metric `lora/norm`."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.model.lora.layer import LoraLinear


@torch.no_grad()
def adapter_metrics(model: nn.Module) -> Mapping[str, float]:
    """Return `lora/norm`, the 2-norm of everything that the adapters add to the weights; nothing without adapters.

    A collective. No product of a weight's size is computed: ‖B A‖² = Σ (Bᵀ B) ∘ (A Aᵀ), both [r, r]. Each rank has rows
    of B, whose products add up, and gathers A.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    if not layers:
        return {}

    gathered = [_full(layer.lora_A) for layer in layers]
    of_a = torch.stack([a @ a.T for a in gathered])
    of_b = torch.stack([_local(layer.lora_B).T @ _local(layer.lora_B) for layer in layers])
    # In float64 on the host: not every device has it.
    gram = of_b.cpu().double()
    if any(isinstance(layer.lora_B, DTensor) for layer in layers):
        dist.all_reduce(gram)

    scales = torch.tensor([layer.scale for layer in layers], dtype=torch.float64)
    squared = (of_a.cpu().double() * gram).sum(dim=(1, 2)) * scales.square()
    # Rounding may leave a negative sum where B is 0.
    return {"lora/norm": squared.sum().clamp_min(0).sqrt().item()}


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

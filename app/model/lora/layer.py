"""A linear layer with a low-rank adapter (LoRA, arXiv 2106.09685).

    y = x Wᵀ + bias + scale · (x Aᵀ) Bᵀ        W, bias frozen; A [r, in], B [out, r] trained

Invariants:
- A and B are float32 at rest, whatever the dtype of W; FSDP2 casts them to the compute dtype when it gathers them.
- The product is rounded to the compute dtype before it is added, as in SGLang's csgmv kernels. With B = 0 exactly 0 is
  added.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.model.sharding import full_tensor, local_shard

ADAPTER_PARAMETERS = ("lora_A", "lora_B")


class LoraLinear(nn.Linear):
    """A frozen `nn.Linear` plus `scale · B A`. Its weight and bias keep their names.

    Attributes:
        lora_A: [r, in] float32.
        lora_B: [out, r] float32.
        scale: Factor of the product, alpha / r.
        adapted: Whether the adapter takes part; see `adapters_off`.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float):
        # Without `nn.Linear.__init__`, which would allocate another weight.
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias

        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, device=device, dtype=torch.float32))
        self.scale = scale
        self.adapted = True

    def forward(self, input: Tensor) -> Tensor:
        base = nn.functional.linear(input, self.weight, self.bias)
        if not self.adapted:
            return base

        # A no-op under FSDP2, which gathers them in the compute dtype.
        a, b = self.lora_A.to(input.dtype), self.lora_B.to(input.dtype)
        product = nn.functional.linear(nn.functional.linear(input, a), b)
        return torch.add(base, product, alpha=self.scale)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter, and not to the base model."""
    return name.rpartition(".")[2] in ADAPTER_PARAMETERS


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute with the base model alone, in this block. No-op for a model without adapters; may be nested."""
    before = [(module, module.adapted) for module in model.modules() if isinstance(module, LoraLinear)]
    for module, _ in before:
        module.adapted = False
    try:
        yield
    finally:
        for module, adapted in before:
            module.adapted = adapted


@torch.no_grad()
def adapter_metrics(model: nn.Module) -> Mapping[str, float]:
    """Return `lora/norm`, the 2-norm of what the adapters add to the weights; an empty mapping without adapters.

    A collective. Never materializes B·A: ‖B A‖² = Σ (Bᵀ B) ∘ (A Aᵀ), both [r, r]. Each rank holds some rows of B; the
    Gram matrices of B are all-reduced, and A is gathered.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    if not layers:
        return {}

    gathered = [full_tensor(layer.lora_A) for layer in layers]
    of_a = torch.stack([a @ a.T for a in gathered])
    of_b = torch.stack([local_shard(layer.lora_B).T @ local_shard(layer.lora_B) for layer in layers])
    # In float64 on the host: not every device has it.
    gram = of_b.cpu().double()
    if any(isinstance(layer.lora_B, DTensor) for layer in layers):
        dist.all_reduce(gram)

    scales = torch.tensor([layer.scale for layer in layers], dtype=torch.float64)
    squared = (of_a.cpu().double() * gram).sum(dim=(1, 2)) * scales.square()
    # Rounding may leave a negative sum where B is 0.
    return {"lora/norm": squared.sum().clamp_min(0).sqrt().item()}

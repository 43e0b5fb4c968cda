"""Adapters with values of their own, and what they add to the weights."""

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from app.model.lora.names import adapter_tensors, module_of
from app.model.policy import PolicyModel
from app.model.sharding import own_rows


@torch.no_grad()
def move(policy: PolicyModel, *, std: float = 0.1) -> None:
    """Give the adapters random values, the same on any number of ranks. Without it B is 0, and so A's gradient."""
    for name, parameter in adapter_tensors(policy):
        generator = torch.Generator().manual_seed(int.from_bytes(sha256(name.encode()).digest()[:4]))
        values = std * torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(values[own_rows(parameter)])
        else:
            parameter.copy_(values)


class Plus(nn.Module):
    """A weight plus an adapter's product: the textbook's form, with a merged weight in every forward."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(a.double())
        self.lora_B = nn.Parameter(b.double())
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.lora_B @ self.lora_A


def adapt(model: Any, adapters: dict[str, Tensor], scale: float) -> dict[str, nn.Parameter]:
    """Add adapters to a float64 model of transformers. Returns its trained parameters by PEFT's names."""
    model.requires_grad_(False)
    trained: dict[str, nn.Parameter] = {}
    for name, a in adapters.items():
        layer, kind = module_of(name)
        if kind == "lora_A":
            partner = name.replace("lora_A", "lora_B")
            plus = Plus(a, adapters[partner], scale)
            parametrize.register_parametrization(model.get_submodule(layer), "weight", plus)
            trained |= {name: plus.lora_A, partner: plus.lora_B}
    return trained

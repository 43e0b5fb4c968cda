"""A linear layer with a low-rank adapter (LoRA, arXiv 2106.09685).

    y = x Wᵀ + bias + scale · (x Aᵀ) Bᵀ        W, bias frozen; A [r, in], B [out, r] trained

Invariants:
- A and B are float32 at rest, whatever the dtype of W; FSDP2 casts them to the compute dtype when it gathers them.
- The product is rounded to the compute dtype before it is added, as in SGLang's csgmv kernels. With B = 0 exactly 0 is
  added.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.config.model import LoraConfig
from app.model.hf_checkpoint import match, open_checkpoint
from app.model.lora.targets import DECAYS, check_targets, is_adapted
from app.model.sharding import local_shard, own_rows

ADAPTER_PARAMETERS = ("lora_A", "lora_B")
NOISE = 0.01  # that `randomize` adds to a weight


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


def add_adapters(causal_lm: Any, lora: LoraConfig) -> None:
    """Replace linear layers of a decoder on the meta device by `LoraLinear`, and freeze everything else.

    Call it before FSDP2 shards the model. The adapters are uninitialized: see `initialize`. Raises `ConfigError` if a
    target names no linear layer of the decoder.
    """
    causal_lm.requires_grad_(False)
    layers = list(_linear_layers(causal_lm))
    check_targets(lora.targets, {name for _, name, _ in layers})

    for parent, name, linear in layers:
        if is_adapted(name, lora.targets):
            setattr(parent, name, LoraLinear(linear, lora.rank, lora.scale))


def _linear_layers(causal_lm: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent, name in it, layer) of what can have an adapter. The LM head is not part of the decoder."""
    for parent in causal_lm.get_decoder().layers.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and name not in DECAYS:
                yield parent, name, child


@torch.no_grad()
def initialize(causal_lm: nn.Module, seed: int) -> None:
    """Set A to uniform values in ±1/√in and B to 0, so that the policy starts as the base model.

    Each A depends on the seed and the name of its layer alone: any number of ranks starts with the same values.
    """
    for name, module in causal_lm.named_modules():
        if not isinstance(module, LoraLinear):
            continue
        bound = 1 / sqrt(module.in_features)
        values = torch.empty(module.lora_A.shape).uniform_(-bound, bound, generator=seeded(f"{seed}/{name}"))
        _copy(module.lora_A, values)
        local_shard(module.lora_B).zero_()


@torch.no_grad()
def start_from(adapters: Mapping[str, nn.Parameter], path: Path) -> None:
    """Set A and B, by PEFT's names, to those of an adapter's directory, which has a tensor for each and no other."""
    key = "model.lora.path"
    expected = {name: tuple(parameter.shape) for name, parameter in adapters.items()}
    with open_checkpoint(path, key) as stored:
        names = match(expected, stored, key=key, accepted="an adapter of the decoder's linear layers of model.path")
        for name, parameter in adapters.items():
            _copy(parameter, stored.read(names[name]))


@torch.no_grad()
def randomize(causal_lm: nn.Module, seed: int) -> None:
    """Set A and B to noise that changes the policy, to compare two computations of it. Seeded as `initialize`.

    The entries of B are such that an adapter adds about `NOISE` to each weight.
    """
    for name, module in causal_lm.named_modules():
        if not isinstance(module, LoraLinear):
            continue
        generator = seeded(f"{seed}/{name}")
        rank = module.lora_A.shape[0]
        _copy(module.lora_A, torch.randn(module.lora_A.shape, generator=generator))
        size = NOISE / (module.scale * sqrt(rank))
        _copy(module.lora_B, size * torch.randn(module.lora_B.shape, generator=generator))


def seeded(key: str) -> torch.Generator:
    """Return a generator on the host, seeded by a text."""
    return torch.Generator().manual_seed(int.from_bytes(sha256(key.encode()).digest()[:7]))


def _copy(parameter: Tensor, values: Tensor) -> None:
    """Copy the full `values` to a parameter, or this rank's rows of them to its shard."""
    own = values[own_rows(parameter)] if isinstance(parameter, DTensor) else values
    local_shard(parameter).copy_(own)

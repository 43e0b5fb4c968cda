"""Adds adapters to a model on the meta device, and initializes them."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.config.model import ALL_LINEAR, LoraConfig
from app.model.hf_checkpoint import match, open_checkpoint
from app.model.lora.base_weights import DECAYS, check_targets
from app.model.lora.layer import LoraLinear
from app.model.parallelize import own_rows
from app.model.sharding import local_shard

NOISE = 0.01  # that `randomize` adds to a weight


def add_adapters(causal_lm: Any, lora: LoraConfig) -> None:
    """Replace linear layers of the decoder by `LoraLinear` in place, and freeze everything else.

    Call it before FSDP2 shards the model. The adapters are uninitialized: see `initialize`.

    Args:
        causal_lm: A Hugging Face causal LM, on the meta device.

    Raises:
        ConfigError: A target names no linear layer of the decoder.
    """
    causal_lm.requires_grad_(False)
    layers = list(_linear_layers(causal_lm))
    check_targets(lora.targets, {name for _, name, _ in layers})

    for parent, name, linear in layers:
        if lora.targets == [ALL_LINEAR] or name in lora.targets:
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
    """Set A and B to those of a PEFT adapter.

    Args:
        adapters: Parameters by PEFT's names.
        path: Directory of the adapter, with a tensor for each of them and no other.
    """
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

"""Trainer ranks with random adapters, and transformers' model with the same adapters merged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from app.config.model import LoraConfig
from app.config.weight_sync import WeightSyncConfig
from app.model.lora.names import adapter_tensors
from app.weight_sync.adapters import AdapterSynchronizer
from tests.rollout.adapters import load_model
from tests.weight_sync.support import make_trainer, started

LORA = LoraConfig(rank=4, alpha=8.0)
SIZE = 0.3  # of the entries of A and B: the adapters move log-probabilities by more than 1


class RandomAdapters:
    """An extension of a trainer rank that sets its adapters to noise."""

    def __init__(self, trainer_rank: Any) -> None:
        self.adapters = dict(adapter_tensors(trainer_rank.model))

    def set(self, seed: int, size: float) -> None:
        """Whatever the number of ranks, the same adapters."""
        for name, parameter in self.adapters.items():
            parameter.data.copy_(distributed_like(parameter, noise(name, tuple(parameter.shape), seed, size)))


def distributed_like(parameter: Any, full: torch.Tensor) -> Any:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor):
        return distribute_tensor(full, parameter.device_mesh, parameter.placements)
    return full


def noise(name: str, shape: Sequence[int], seed: int, size: float) -> torch.Tensor:
    """Of one tensor, by its PEFT name."""
    random = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
    return size * torch.randn(*shape, generator=random)


def merged_model(model: Path, seed: int, size: float = SIZE) -> Any:
    """Transformers' model with the adapters of `seed`: W + alpha / rank · B A, layer by layer."""
    policy = load_model(model)
    with torch.no_grad():
        for name, layer in policy.named_modules():
            adapted = isinstance(layer, torch.nn.Linear) and ".layers." in name
            if adapted and name.rpartition(".")[2] not in ("in_proj_a", "in_proj_b"):
                path = f"base_model.model.{name}"
                a = noise(f"{path}.lora_A.weight", (LORA.rank, layer.in_features), seed, size)
                b = noise(f"{path}.lora_B.weight", (layer.out_features, LORA.rank), seed, size)
                layer.weight += LORA.alpha / LORA.rank * b @ a
    return policy


async def adapter_trainer(model: Path, folder: Path, *, ranks: int = 1) -> Any:
    """Ranks that train adapters, set up, with the extension `random`."""
    trainer = await started(make_trainer(model, folder, ranks=ranks, lora=LORA), weights=False)
    await trainer.attach("random", RandomAdapters)
    return trainer


async def set_adapters(trainer: Any, seed: int, size: float = SIZE) -> None:
    await trainer.call("random", RandomAdapters.set, seed=seed, size=size)


async def adapter_synchronizer(
    trainer: Any,
    engines: Sequence[Any],
    *,
    one_machine: bool = True,
    tensor_parallel: int = 1,
    timeout_s: float = 60.0,
) -> AdapterSynchronizer:
    synchronizer = AdapterSynchronizer(
        trainer,
        engines,
        WeightSyncConfig(timeout_s=timeout_s),
        tensor_parallel=tensor_parallel,
        one_machine=one_machine,
    )
    await synchronizer.prepare()
    return synchronizer

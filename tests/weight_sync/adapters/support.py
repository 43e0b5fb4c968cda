"""Trainer ranks with the random adapters of tests/rollout/adapters.py."""

from pathlib import Path
from typing import Any

from app.config.weight_sync import WeightSyncConfig
from app.model.lora.names import adapter_tensors
from app.weight_sync.adapters import AdapterSynchronizer
from tests.rollout.adapters import LORA, SIZE, noise
from tests.weight_sync.support import make_trainer, started


class RandomAdapters:
    """An extension of a trainer rank that sets its adapters to noise."""

    def __init__(self, trainer_rank: Any) -> None:
        self.adapters = dict(adapter_tensors(trainer_rank.model))

    def set(self, seed: int, size: float) -> None:
        """Whatever the number of ranks, the same adapters."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        for name, parameter in self.adapters.items():
            full = noise(name, tuple(parameter.shape), seed, size)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(full)


async def adapter_trainer(model: Path, folder: Path, *, ranks: int = 1) -> Any:
    """Ranks that train adapters, set up, with the extension `random`."""
    trainer = await started(make_trainer(model, folder, ranks=ranks, lora=LORA), weights=False)
    await trainer.attach("random", RandomAdapters)
    return trainer


async def set_adapters(trainer: Any, seed: int, size: float = SIZE) -> None:
    await trainer.call("random", RandomAdapters.set, seed=seed, size=size)


async def adapter_synchronizer(trainer: Any, engines: list[Any], *, one_machine: bool = True) -> AdapterSynchronizer:
    synchronizer = AdapterSynchronizer(
        trainer, dict(enumerate(engines)), WeightSyncConfig(timeout_s=60.0), tensor_parallel=1, one_machine=one_machine
    )
    await synchronizer.prepare()
    return synchronizer

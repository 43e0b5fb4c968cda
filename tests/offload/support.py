"""A fake trainer rank for memory offload in this process, and an offload that poisons freed memory."""

from typing import Any

import torch

from app.config.device import DeviceKind
from app.device import device_of
from app.offload.trainer import Offload
from app.trainer.checkpoint_state import RankState
from app.trainer.step import TrainStep
from app.types import TrainerMemory


class FakeRank:
    """The attributes of `TrainerRank` that `Offload` uses."""

    rank = 0
    torch_device = torch.device("cpu")
    device = device_of(DeviceKind.cpu)

    def __init__(self, step: TrainStep, reference: torch.nn.Module | None = None) -> None:
        self.step = step
        self.model = step.model
        self.optimizer = step.optimizer
        self.reference = reference
        self.state = RankState(self.model, self.optimizer, self.torch_device, timeout_s=60)
        self.offloaded: set[TrainerMemory] = set()


class Poisoned(Offload):
    """Offload that fills memory with NaN instead of freeing it, so that a read of offloaded tensors shows."""

    def __init__(self, rank: Any) -> None:
        super().__init__(rank, moves=True)

    def _free(self, storage: Any) -> None:
        storage.fill_(0xFF)

    def _allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        assert storage.nbytes() == nbytes


def storages(tensors: Any) -> list[torch.UntypedStorage]:
    return [getattr(each, "_local_tensor", each).untyped_storage() for each in tensors]

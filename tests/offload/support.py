"""A trainer rank as memory offload sees it, in this process, and an offload that poisons what it takes away."""

from typing import Any

import torch

from app.config.device import DeviceKind
from app.device import device_of
from app.offload.trainer import Offload
from app.trainer.checkpoint_state import RankState
from app.trainer.step import TrainStep
from app.types import TrainerMemory


class Host:
    """What `Offload` uses of a `TrainerRank`."""

    rank = 0
    torch_device = torch.device("cpu")
    device = device_of(DeviceKind.cpu)

    def __init__(self, step: TrainStep, reference: torch.nn.Module | None = None):
        self.step, self.model, self.optimizer, self.reference = step, step.model, step.optimizer, reference
        self.state = RankState(self.model, self.optimizer, self.torch_device, timeout_s=60)
        self.offloaded: set[TrainerMemory] = set()


class Poisoned(Offload):
    """Copies as on a device, but leaves NaN behind in place of freed memory: reading it does not crash, it shows."""

    def __init__(self, host: Any):
        super().__init__(host, moves=True)

    def _free(self, storage: torch.UntypedStorage) -> None:
        storage.fill_(0xFF)

    def _regrow(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        assert storage.nbytes() == nbytes


def storages(tensors: Any) -> list[torch.UntypedStorage]:
    return [getattr(each, "_local_tensor", each).untyped_storage() for each in tensors]

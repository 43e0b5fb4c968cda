"""A trainer of one process that saves checkpoints.

`python -m tests.checkpoint.saves MODEL FOLDER` saves one after the other until it is killed, and says the step of each
that it committed.
"""

import asyncio
import sys
import threading
from itertools import count
from pathlib import Path

import torch

from app.checkpoint.manager import Checkpoints, RunState, latest, read_state
from app.config.trainer import TrainerConfig
from app.device.torchvision_shim import define_operators
from app.trainer.checkpoint_state import RankState
from tests.checkpoint.resume_scenarios import trainer_of
from tests.trainer.support import Scenario, scored_groups, train
from tests.trainer.test_step import GRPO

DEADLINE_S = 120.0


class OneProcess:
    """A trainer of one process under the calls that `Checkpoints` makes."""

    def __init__(self, state: RankState):
        self.state = state
        self.gate = threading.Event()  # writes wait for it
        self.gate.set()

    async def checkpoint_bytes(self) -> int:
        return self.state.bytes

    async def capture(self) -> int:
        return self.state.capture()

    async def write(self, folder: Path) -> None:
        await asyncio.to_thread(self._write, folder)

    def _write(self, folder: Path) -> None:
        assert self.gate.wait(DEADLINE_S)
        self.state.write(folder)


async def save_for_ever(path: Path, folder: Path) -> None:
    scenario = Scenario(GRPO, scored_groups(2), trainer=TrainerConfig())
    step, state = trainer_of(path, scenario)
    train(step, scenario)
    trainer, checkpoints = OneProcess(state), Checkpoints(folder, keep=2)
    checkpoints.prepare(state.bytes)
    before = latest(folder)
    for number in count(1 + (read_state(before).step if before else 0)):
        await checkpoints.save(trainer, RunState(number, number))
        await checkpoints.wait()
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    define_operators()
    torch.set_num_threads(1)
    asyncio.run(save_for_ever(Path(sys.argv[1]), Path(sys.argv[2])))

"""A single-process trainer that saves checkpoints.

`python -m tests.checkpoint.saves MODEL FOLDER` saves one checkpoint after the other until it is killed, and prints the
step of each one it committed.
"""

import asyncio
import sys
import threading
from itertools import count
from pathlib import Path

import torch

from app.checkpoint.folder import latest
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState, read_state
from app.config.trainer import TrainerConfig
from app.device.torchvision_shim import define_operators
from app.trainer.checkpoint_state import RankState
from tests.checkpoint.resume_scenarios import trainer_of
from tests.simulation import SimTrainer
from tests.trainer.support import Scenario, scored_groups, train
from tests.trainer.test_step import GRPO

DEADLINE_S = 120.0


class OneProcess(SimTrainer):
    """The checkpoints of a trainer of one process."""

    def __init__(self, state: RankState) -> None:
        super().__init__()
        self.state = state
        self.gate = threading.Event()  # writes wait while it is cleared
        self.gate.set()

    async def checkpoint_bytes(self) -> int:
        return self.state.bytes

    async def capture(self) -> int:
        return self.state.capture()

    async def write(self, folder: Path) -> dict[str, int]:
        return await asyncio.to_thread(self._write, folder)

    def _write(self, folder: Path) -> dict[str, int]:
        assert self.gate.wait(DEADLINE_S)
        return self.state.write(folder)


async def save_forever(path: Path, folder: Path) -> None:
    scenario = Scenario(GRPO, scored_groups(2), trainer=TrainerConfig())
    step, state = trainer_of(path, scenario)
    train(step, scenario)
    trainer = OneProcess(state)
    checkpoints = CheckpointManager(folder, keep=2)
    checkpoints.prepare(state.bytes)
    last = latest(folder)
    for committed in count(1 + (read_state(last).step if last else 0)):
        await checkpoints.save(trainer, RunState(committed, committed))
        await checkpoints.wait()
        sys.stdout.write(f"{committed}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    define_operators()
    torch.set_num_threads(1)
    asyncio.run(save_forever(Path(sys.argv[1]), Path(sys.argv[2])))

"""A process that saves one checkpoint after the other until it is killed: `python -m tests.trainer.saves MODEL FOLDER`.

It says the step of each that it committed.
"""

import asyncio
import sys
from itertools import count
from pathlib import Path

import torch

from app.device.torchvision import define_operators
from app.trainer.checkpoint import Checkpoints, RunState, latest, read_state
from app.trainer.schema import TrainerConfig
from tests.trainer.lineage import trainer_of
from tests.trainer.support import Scenario, scored_groups, train
from tests.trainer.test_checkpoint import OneProcess
from tests.trainer.test_step import GRPO


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

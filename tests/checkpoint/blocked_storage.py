"""`python -m tests.checkpoint.blocked_storage <work> <folder>`: file work that blocks for ever, and its deadline."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

from app.checkpoint import manager
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState
from app.errors import RunError
from app.placement.colocate import Colocate
from app.utils import files
from tests.checkpoint.plain_files import PlainFiles, save
from tests.simulation import World, config

TIMEOUT_S = 0.5


def block(*_: Any) -> Any:
    """Stand in for a call to storage that does not answer."""
    threading.Event().wait()


async def commit(folder: Path) -> None:
    checkpoints = CheckpointManager(folder, keep=1, timeout_s=TIMEOUT_S)
    vars(files)["sync"] = block
    await checkpoints.save(PlainFiles(), RunState(1, 1))
    await checkpoints.wait()


async def create(folder: Path) -> None:
    vars(files)["remove"] = block
    await CheckpointManager(folder, keep=1, timeout_s=TIMEOUT_S).save(PlainFiles(), RunState(1, 1))


async def read(folder: Path) -> None:
    vars(manager)["newest_intact"] = block
    await CheckpointManager(folder, keep=1, timeout_s=TIMEOUT_S).resume_point()


async def flush(folder: Path) -> None:
    settings = config()
    settings.trainer.timeout_s = TIMEOUT_S
    world = World(settings, folder)
    world.recorder.flush = block  # type: ignore[method-assign]
    await Colocate(world.context(), 1).save()


if __name__ == "__main__":
    work = {"commit": commit, "create": create, "read": read, "flush": flush}[sys.argv[1]]
    if work is read:
        save(Path(sys.argv[2]), [1])
    try:
        asyncio.run(work(Path(sys.argv[2])))
    except RunError as error:
        sys.exit(str(error))

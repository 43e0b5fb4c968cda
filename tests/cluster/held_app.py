"""`python -m tests.cluster.held_app`: the application, held at a moment that a test needs.

The environment variable `HOLD` names the moment: `sync`, before the second bucket of the third weight sync, or
`checkpoint`, after the second checkpoint was captured and before a rank writes it. There the application creates the
file `held` in the folder `HOLD_FOLDER` and goes on once the file `go` is there.
"""

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.main import cli

FOLDER = Path(os.environ["HOLD_FOLDER"])


def hold_before(owner: type, name: str, applies: Callable[..., bool]) -> None:
    """Hold the application in this method, before it does anything, when `applies` to its arguments."""
    method = getattr(owner, name)

    async def held(*arguments: Any, **keywords: Any) -> Any:
        if applies(*arguments) and not (FOLDER / "held").exists():
            (FOLDER / "held").touch()
            while not (FOLDER / "go").exists():  # noqa: ASYNC110 (another process creates it)
                await asyncio.sleep(0.05)
        return await method(*arguments, **keywords)

    setattr(owner, name, held)


def hold(moment: str) -> None:
    if moment == "sync":
        from app.weight_sync.transport.base import Deadline

        hold_before(Deadline, "gather", lambda self, phase, calls: self.version == 3 and phase.startswith("bucket 1 "))
    elif moment == "checkpoint":
        from app.trainer.remote import RemoteTrainer

        calls = itertools.count(1)
        hold_before(RemoteTrainer, "write", lambda *arguments: next(calls) == 2)


if __name__ == "__main__":
    hold(os.environ["HOLD"])
    cli()

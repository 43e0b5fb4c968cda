"""Ends a run that makes no progress, with the stacks of all tasks in `logs/stacks.log`.

Single calls have their own deadlines (an engine's progress, a trainer call, a phase of a sync). The watchdog covers
what they do not: groups must keep finishing (for training or evaluation), and so must the phases of a step.
"""

import asyncio
from typing import Protocol

from app.config import RunConfig
from app.errors import RunError
from app.placement.context import RunContext
from app.utils.tasks import task_stacks

POLL_SECONDS = 1.0


class Watched(Protocol):
    """What the watchdog reads of a controller."""

    config: RunConfig
    context: RunContext

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes when the run makes progress."""

    def situation(self) -> str:
        """Describe what the run is waiting for, in one line."""


async def watch(run: Watched) -> None:
    """Raise `RunError` when nothing finished for longer than any single call may take."""
    config = run.config
    limit = max(config.trainer.timeout_s, config.rollout.stall_timeout_s, config.weight_sync.timeout_s)
    loop = asyncio.get_running_loop()

    last = run.progress
    changed_at = loop.time()
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if run.progress != last:
            last = run.progress
            changed_at = loop.time()
        elif loop.time() - changed_at > limit:
            path = run.context.recorder.folder / "logs" / "stacks.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(task_stacks())
            raise RunError(f"no progress for {limit:.0f} s: {run.situation()}; stacks: {path}")

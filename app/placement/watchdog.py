"""Ends a run in which nothing happens any more, saying what everyone waits for, with the stacks in the logs.

Single calls have deadlines of their own (an engine's progress, a trainer call, a phase of a push); this watches what
none of them sees: that groups keep arriving and steps keep finishing.
"""

import asyncio
import io
from typing import Protocol

from app.config import RunConfig
from app.errors import RunError
from app.placement.parts import Parts
from app.placement.staleness import Admission

POLL_SECONDS = 1.0


class Watched(Protocol):
    config: RunConfig
    parts: Parts
    admission: Admission
    steps_finished: int

    def situation(self) -> str: ...


async def watch(run: Watched) -> None:
    """Raise `RunError` when neither a group was committed nor a step finished for longer than any call may take."""
    limit = max(run.config.trainer.timeout_s, run.config.rollout.stall_timeout_s, run.config.weight_sync.timeout_s)
    loop = asyncio.get_running_loop()
    seen, since = (-1, -1), loop.time()
    while True:
        await asyncio.sleep(POLL_SECONDS)
        now = (run.admission.accepted + run.admission.in_flight, run.steps_finished)
        if now != seen:
            seen, since = now, loop.time()
        elif loop.time() - since > limit:
            path = run.parts.recorder.folder / "logs" / "stacks.log"
            path.write_text(task_stacks())
            raise RunError(f"nothing happened for {limit:.0f} s: {run.situation()}; stacks: {path}")


def task_stacks() -> str:
    """Where every task of this event loop stands."""
    out = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(file=out)
    return out.getvalue()

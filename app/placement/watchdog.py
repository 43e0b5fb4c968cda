"""Ends a run that makes no progress, with the stacks of all tasks in `logs/stacks.log`.

Single calls have their own deadlines (an engine's progress, a trainer call, a phase of a sync). The watchdog covers
what none of them sees: groups must keep finishing (for training or evaluation), and so must the phases of a step.
"""

import asyncio
import traceback
from typing import Protocol

from app.config import RunConfig
from app.errors import RunError
from app.placement.context import RunContext

POLL_SECONDS = 1.0


class Watched(Protocol):
    """What the watchdog reads of a controller."""

    config: RunConfig
    context: RunContext

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes when the run makes progress."""
        ...

    def situation(self) -> str:
        """Describe what the run is waiting for, in one line."""
        ...


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


def task_stacks() -> str:
    """Return the stack of every task of this event loop, outermost coroutine first."""
    return "\n".join(f"--- task {task.get_name()}\n{_stack(task.get_coro())}" for task in asyncio.all_tasks())


def _stack(awaited: object) -> str:
    """Follow `cr_await` from the outermost frame, which is all that `Task.print_stack` shows."""
    lines: list[str] = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            lines.append(f"  {awaited!r}\n")
            break
        lines += traceback.format_list(traceback.StackSummary.extract([(frame, frame.f_lineno)]))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return "".join(lines)

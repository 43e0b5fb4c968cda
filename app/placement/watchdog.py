"""Ends a run in which nothing happens any more, saying what everyone waits for, with the stacks in the logs.

Single calls have deadlines of their own (an engine's progress, a trainer call, a phase of a push); this watches what
none of them sees: that groups keep being finished (used or filtered, for training or evaluation) and steps too.
"""

import asyncio
import traceback
from typing import Protocol

from app.config import RunConfig
from app.errors import RunError
from app.placement.context import RunContext

POLL_SECONDS = 1.0


class Watched(Protocol):
    config: RunConfig
    parts: RunContext

    @property
    def progress(self) -> tuple[object, ...]:
        """Changes whenever something happens."""
        ...

    def situation(self) -> str: ...


async def watch(run: Watched) -> None:
    """Raise `RunError` when no group was finished and no phase of a step for longer than any call may take."""
    limit = max(run.config.trainer.timeout_s, run.config.rollout.stall_timeout_s, run.config.weight_sync.timeout_s)
    loop = asyncio.get_running_loop()
    seen, since = run.progress, loop.time()
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if run.progress != seen:
            seen, since = run.progress, loop.time()
        elif loop.time() - since > limit:
            path = run.parts.recorder.folder / "logs" / "stacks.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(task_stacks())
            raise RunError(f"nothing happened for {limit:.0f} s: {run.situation()}; stacks: {path}")


def task_stacks() -> str:
    """Where every task of this event loop stands, from its outermost coroutine to what it awaits."""
    return "\n".join(f"--- task {task.get_name()}\n{_stack(task.get_coro())}" for task in asyncio.all_tasks())


def _stack(awaited: object) -> str:
    """`Task.print_stack` shows the outermost frame only; the rest hangs on it by `cr_await`."""
    lines: list[str] = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            lines.append(f"  {awaited!r}\n")
            break
        lines += traceback.format_list(traceback.StackSummary.extract([(frame, frame.f_lineno)]))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return "".join(lines)

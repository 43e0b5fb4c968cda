"""Asyncio helpers: run until a signal, run several tasks as one, find the root cause of several failures."""

import asyncio
import signal
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

from app.errors import Interrupted, RunError

T = TypeVar("T")


async def until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it on SIGINT and SIGTERM.

    Raises:
        Interrupted: A signal arrived. Raised after the cleanup of `work`.
    """
    task = asyncio.ensure_future(work)
    received: list[str] = []

    def cancel(number: signal.Signals) -> None:
        received.append(number.name)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel, number)

    try:
        return await task
    except asyncio.CancelledError:
        raise Interrupted(f"interrupted by {received[0]}" if received else "interrupted") from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def gather_or_raise(*work: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines concurrently. The first failure cancels the others and is raised as the root cause."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in work:
                tasks.create_task(each)
    except BaseExceptionGroup as failures:
        raise root_cause(failures) from None


def root_cause(failures: BaseExceptionGroup) -> BaseException:
    """Return the failure to report: a `RunError` before any other error, a cancellation last."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [failures]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            flat.append(error)
    return min(flat, key=lambda error: (not isinstance(error, RunError), isinstance(error, asyncio.CancelledError)))


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

"""Asyncio helpers: run until a signal, run several tasks as one, find the root cause of several failures."""

import asyncio
import signal
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

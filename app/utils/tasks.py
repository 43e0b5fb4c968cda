"""Tasks of an event loop: several as one, until a signal, and which of several failures to report."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from app.errors import Interrupted, RunError

T = TypeVar("T")


async def until_signal(work: Coroutine[Any, Any, T]) -> T:
    """The work's result; SIGINT and SIGTERM end it with `Interrupted`, after everything was ended."""
    task = asyncio.ensure_future(work)
    asked: list[str] = []

    def stop(number: signal.Signals) -> None:
        asked.append(number.name)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        raise Interrupted(f"interrupted by {asked[0]}" if asked else "interrupted") from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def gather_or_raise(*work: Any) -> None:
    """All of it; the first failure is raised and the rest is cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as failures:
        raise root_cause(failures) from None


def root_cause(failures: BaseExceptionGroup) -> BaseException:
    """The failure that ended the others: our own sentences before anything else, cancellations last."""
    flat: list[BaseException] = []
    waiting: list[BaseException] = [failures]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        else:
            flat.append(error)
    return min(flat, key=lambda error: (not isinstance(error, RunError), isinstance(error, asyncio.CancelledError)))

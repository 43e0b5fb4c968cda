"""Asyncio helpers: run until a signal, run file work in a thread, run several tasks as one, find their root cause."""

import asyncio
import contextlib
import signal
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from app.errors import Interrupted, RunError

P = ParamSpec("P")
T = TypeVar("T")


async def until_signal(work: Coroutine[Any, Any, T], on_second: Callable[[], None] | None = None) -> T:
    """Return the result of `work`; cancel it on SIGINT and SIGTERM.

    The first signal cancels `work`, whose cleanup may take time. The second only calls `on_second`, because a scheduler
    or an impatient user often sends two. The third cancels again, which ends the cleanup.

    Raises:
        Interrupted: A signal arrived. Raised after the cleanup of `work`.
    """
    task = asyncio.ensure_future(work)
    received: list[str] = []

    def cancel(number: signal.Signals) -> None:
        received.append(number.name)
        if len(received) != 2:
            task.cancel()
        elif on_second is not None:
            on_second()

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


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Called on an event loop, it blocks that loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Run a function that may block forever, such as file work on storage that hangs, in a thread of its own.

    Neither the loop nor the process waits for the thread at its end. `asyncio.run` joins the threads of
    `asyncio.to_thread`, so that a deadline around them would end the wait but not the program.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not future.done():  # not cancelled
            set_outcome(outcome)

    def run() -> None:
        set_outcome: Callable[[Any], None] = future.set_result
        outcome: object
        try:
            outcome = function(*args, **kwargs)
        except BaseException as error:
            set_outcome, outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, set_outcome, outcome)

    threading.Thread(target=run, name=f"in_thread {getattr(function, '__name__', function)}", daemon=True).start()
    return future


async def run_to_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread. A cancellation is raised only after the function has returned.

    A thread cannot be cancelled: without this, its caller would continue beside it. A second cancellation is raised at
    once, so `function` must leave its files in order on its own.
    """
    running = in_thread(function, *args, **kwargs)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # retrieved: the cancellation is raised instead
        raise


async def gather_or_raise(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Return the results of concurrent coroutines. The first failure cancels the others; its root cause is raised."""
    async with task_group() as tasks:
        started = [tasks.create_task(each) for each in work]
    return [task.result() for task in started]


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield a task group. The first failure cancels its tasks and the block; its root cause is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
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

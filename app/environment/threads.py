"""Synchronous code of users, in threads that end with the process."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any


class Late(Exception):
    """A call took longer than its time limit; its thread still runs."""


async def in_thread(call: Callable[[], Any], timeout_s: float) -> Any:
    """Return what `call` returns, called in a daemon thread of its own.

    A thread of a pool would be joined when the process exits, and a late call would keep its place.

    Raises:
        Late: There is no result after `timeout_s`.
        RuntimeError: The call raised `SystemExit` or the like, which must not end the process.
        Exception: Whatever the call raised.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # handed to whoever waits
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits

    threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True).start()
    await asyncio.wait((outcome,), timeout=timeout_s)
    if not outcome.done():
        raise Late

    result, error = outcome.result()
    if error is None:
        return result
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"it raised {type(error).__name__} {error}".rstrip()) from error

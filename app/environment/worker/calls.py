"""Calls of an environment's methods: async ones on the loop, the others in a thread."""

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Exited(Exception):
    """Code of an environment raised `SystemExit`, or another exception that would end the process: the cause."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}".rstrip(": "))
        self.__cause__ = cause


class Calls:
    """Runs the methods of one environment.

    All its synchronous methods run in the same thread, since many libraries bind an object to its thread. One that
    hangs is left behind with its thread, for which a worker does not wait when it ends.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[tuple[Any, BaseException | None]] | None = None  # call in the thread

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done()

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a plain or async function returns. Raises `Exited` if it raised another `BaseException`."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args)

            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "environment")
            self._last = self._thread.submit(_result_or_error, function, *args)
            result, error = await asyncio.wrap_future(self._last)
            if error is not None:
                raise error
            return await result if inspect.isawaitable(result) else result
        except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) as error:
            raise Exited(error) from error

    async def until_idle(self, seconds: float | None) -> bool:
        """Wait for the method that still runs in the thread; None: without a limit. Returns whether it ended."""
        if self._last is not None:
            await asyncio.wait({asyncio.wrap_future(self._last)}, timeout=seconds)
        return not self.busy

    def end(self) -> None:
        """End the thread, or leave it behind where it hangs; a later call gets a new one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        self._thread = self._last = None


def _result_or_error(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    """Call a function. Not every exception can be raised by a future."""
    try:
        return function(*args), None
    except Exception as error:
        return None, error
    except BaseException as error:
        return None, Exited(error)

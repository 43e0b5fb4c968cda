"""Calls of an environment's methods: async ones on the loop, the others in a thread; and their time."""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
        self._left: list[Future[Any]] = []  # calls in threads that were left behind

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
        if self._last is not None:
            self._left.append(self._last)
        self._thread = self._last = None

    @property
    def stuck(self) -> bool:
        """Whether a call that was left behind still runs."""
        return not all(each.done() for each in self._left)


def _result_or_error(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    """Call a function. Not every exception can be raised by a future."""
    try:
        return function(*args), None
    except Exception as error:
        return None, error
    except BaseException as error:
        return None, Exited(error)


class Clock:
    """Measures an episode's time in its environment's own code, without waiting for engines.

    `timeout_s` limits a segment, which is the time between two requests to the policy, or a call of a method.
    """

    def __init__(self, timeout_s: float) -> None:
        self.step = "run"  # what runs now, for people
        self._timeout_s = timeout_s
        self._since = time.monotonic()  # of the current segment
        self._before = 0.0  # seconds of the earlier ones
        self._requests = 0  # in flight; while there are any, the episode waits

    def begin(self, step: str) -> None:
        self._before = self.seconds
        self._since = time.monotonic()
        self.step = step

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the clock while a request to the policy is in flight."""
        if self._requests == 0:
            self._before = self.seconds
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the environment's own code so far."""
        return self._before + self._segment_s

    @property
    def left(self) -> float:
        """Seconds until the current segment is late; not positive: it is."""
        return self._timeout_s - self._segment_s

    @property
    def _segment_s(self) -> float:
        return 0.0 if self._requests else time.monotonic() - self._since

"""Calls of an environment's methods: async ones on the loop, the others in a thread; and their time."""

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Exited(Exception):
    """Code of an environment raised `SystemExit`, or another exception that would end the process: the cause."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}".rstrip(": "))
        self.__cause__ = cause


class Calls:
    """Runs the methods of one environment.

    All its synchronous methods run in the same thread, since many libraries bind an object to its thread. The thread is
    a daemon: nothing waits for one that hangs.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        """Whether a synchronous method runs."""
        return not self._idle.is_set()

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a plain or async function returns.

        Raises:
            Exited: It raised something that is not an `Exception`.
        """
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            result = await self._in_thread(function, *args)
            return await result if inspect.isawaitable(result) else result
        except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) as error:
            raise Exited(error) from error

    async def until_idle(self, seconds: float) -> bool:
        """Wait for the method that still runs in the thread. Returns whether it ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return not self.busy

    def abandon(self) -> None:
        """Leave a thread that hangs behind; the next call gets a new one."""
        self.end()
        self._idle = asyncio.Event()
        self._idle.set()

    def end(self) -> None:
        """Let the thread end after what it runs."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        idle = self._idle

        def deliver(result: Any, error: BaseException | None) -> None:
            idle.set()
            if future.done():
                return  # the loop is closed
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def job() -> None:
            result, failure = None, None
            try:
                result = function(*args)
            except Exception as error:
                failure = Exited(error) if isinstance(error, StopIteration) else error
            except BaseException as error:
                failure = Exited(error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(deliver, result, failure)

        idle.clear()
        self._thread_jobs().put(job)
        return await future

    def _thread_jobs(self) -> "queue.SimpleQueue[Callable[[], None] | None]":
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name="environment", daemon=True).start()
        return self._jobs


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()


class Clock:
    """Measures an episode's time in its environment's own code, without waiting for engines.

    A segment is the time between two requests to the policy.

    Args:
        timeout_s: Limit of one segment, or of one call of `begin`, `step` or `score`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.step = "run"  # what runs now, for people
        self._timeout_s = timeout_s
        self._since = time.monotonic()  # of the current segment
        self._before = 0.0  # seconds of the earlier ones
        self._requests = 0  # in flight; while there are any, the episode waits

    def begin(self, step: str) -> None:
        """Begin a segment of its own."""
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

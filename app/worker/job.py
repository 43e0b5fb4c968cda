"""The driver's view of one job in a worker: its messages, and how it ended."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from app.worker.wire import Close, Closed, Failed, Request

ABORTED = "it was aborted"


class Job:
    """One job that runs in a worker.

    Lifecycle: `next` until it returns the last message; `close` at any time.

    Args:
        number: Of the job, unique in its pool.
        kill_worker: Ends the worker, given the kind of the failure and a text.

    Attributes:
        sent_s: When the worker last got a message about this job, as `time.monotonic()`.
        closing_s: When it got the message to abort it, or None.
        force: It was cancelled, and its worker is killed after a few seconds.
        failure: How the job failed; None before its end, and if it ended well or was aborted.
    """

    def __init__(
        self,
        number: int,
        send: Callable[[Any], None],
        kill_worker: Callable[[str, str], None],
        on_end: Callable[["Job"], None],
    ) -> None:
        self.number = number
        self.sent_s = time.monotonic()
        self.closing_s: float | None = None
        self.force = False
        self.failure: Failed | None = None
        self._kill_worker = kill_worker
        self._send = send
        self._on_end = on_end
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._requests: set[int] = set()
        self._ended = asyncio.Event()

    @property
    def waits(self) -> bool:
        """Whether the job waits for an answer of the driver, so that none of its own code runs."""
        return bool(self._requests)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def next(self) -> Any:
        """Return the next request or the last message: the result, or Failed, of the kind `aborted` if it was aborted.

        After the last message nothing follows.
        """
        return await self._messages.get()

    def reply(self, request: Request, message: Any) -> None:
        """Send the answer to a request; without effect when the job has ended."""
        self._requests.discard(request.number)
        if not self.ended:
            self.sent_s = time.monotonic()
            self._send(message)

    def kill(self, kind: str, text: str) -> None:
        """Kill the worker, unless the job has ended; it ends as Failed of this kind."""
        if not self.ended:
            self._kill_worker(kind, text)

    async def close(self, *, force: bool = False) -> None:
        """Abort the job unless it has ended, and wait until it has, or its worker is killed.

        Args:
            force: Kill the worker after some seconds if the job's code runs in a thread or blocks the event loop.
        """
        if not self.ended and self.closing_s is None:
            self.closing_s = time.monotonic()
            self.force = force
            self._send(Close(self.number, force))
        await self._ended.wait()

    def receive(self, message: Any) -> None:
        if self.ended:
            return
        if isinstance(message, Request):
            self._requests.add(message.number)
            self._messages.put_nowait(message)
            return

        self.failure = message if isinstance(message, Failed) else None
        self._ended.set()
        aborted = Failed(self.number, "aborted", ABORTED)
        self._messages.put_nowait(aborted if isinstance(message, Closed) else message)
        self._on_end(self)

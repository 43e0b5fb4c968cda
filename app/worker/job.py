"""The driver's view of one job in a worker: its messages, and how it ended."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.worker.wire import Close, Closed, Failed, Request

ABORTED = "it was aborted"


@dataclass(eq=False)
class Job:
    """One job that runs in a worker.

    Lifecycle: `next` until it returns the last message; `close` at any time.
    """

    number: int  # unique in its pool
    _send: Callable[[Any], None]
    _kill_worker: Callable[[str, str], None]  # kind of the failure, text
    _on_end: Callable[["Job"], None]
    sent_s: float = field(default_factory=time.monotonic)  # when the worker last got a message about this job
    closing_s: float | None = None  # when it got the message to abort it
    force: bool = False  # it was cancelled, and its worker is killed after a few seconds
    failure: Failed | None = None  # None before its end, and if it ended well or was aborted
    _messages: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    _requests: set[int] = field(default_factory=set)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def waits(self) -> bool:
        """Whether the job waits for an answer of the driver, so that none of its own code runs."""
        return bool(self._requests)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def next(self) -> Any:
        """Return the next request or the final message: the result, or Failed (of kind `aborted` after an abort)."""
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
        """Abort the job unless it has ended, and wait for that.

        `force`: kill the worker after some seconds if the job's code runs in a thread or blocks the event loop.
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

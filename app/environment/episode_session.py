"""The driver's view of one episode: what it asks for, and how it ended."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from app.environment.wire import Answer, Ask, Close, Closed, End, Failed, FromDriver

Event = Ask | End | Failed
ABORTED = "the episode was aborted"


class Sender(Protocol):
    """The worker of an episode."""

    def send(self, message: FromDriver) -> None: ...


class EpisodeSession:
    """One episode that runs in a worker.

        session = await pool.begin(task, prompt_ids)
        try:
            while isinstance(event := await session.next(), Ask):
                session.answer(event, token_ids, "stop")
        finally:
            await session.close()

    Lifecycle: `next` and `answer` until `next` returns End or Failed; `close` at any time.

    Attributes:
        number: Of the episode, unique in its pool.
        told_s: When the worker last got a message about this episode, as `time.monotonic()`.
        closing_s: When it got the message to abort it, or None.
        at_once: It was cancelled, and its worker is killed rather than waited for.
        failure: How the episode failed; None before its end, and if it ended well or was aborted.
    """

    def __init__(self, number: int, task_id: str, worker: Sender, on_end: Callable[["EpisodeSession"], None]) -> None:
        self.number = number
        self.task_id = task_id
        self.told_s = time.monotonic()
        self.closing_s: float | None = None
        self.at_once = False
        self.failure: Failed | None = None
        self._worker = worker
        self._on_end = on_end
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._asked: set[int] = set()
        self._ended = asyncio.Event()

    @property
    def waits(self) -> bool:
        """Whether the episode waits for an engine, so that none of its own code runs."""
        return bool(self._asked)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def next(self) -> Event:
        """Return the next request, or how the episode ended. An aborted one ends as Failed, of the kind `aborted`.

        After the end nothing follows.
        """
        return await self._events.get()

    def answer(self, ask: Ask, token_ids: Sequence[int], finish: str, logprobs: Sequence[float] | None = None) -> None:
        """Answer a request; without effect when the episode has ended.

        Args:
            ask: The request.
            token_ids: What was sampled.
            finish: stop, length, or full: no room was left and nothing was sampled.
            logprobs: One for each token, where `ask.logprobs`.
        """
        self._asked.discard(ask.number)
        if not self.ended:
            self.told_s = time.monotonic()
            self._worker.send(Answer(ask.number, token_ids, finish, logprobs))

    async def close(self, *, at_once: bool = False) -> None:
        """Abort the episode unless it has ended, and wait until its environment is closed, or its worker killed.

        Args:
            at_once: A step that runs in a thread, or blocks the worker's event loop, is not waited for until its
                deadline: after some seconds the worker is killed.
        """
        if not self.ended and self.closing_s is None:
            self.closing_s = time.monotonic()
            self.at_once = at_once
            self._worker.send(Close(self.number, at_once))
        await self._ended.wait()

    def receive(self, message: Event | Closed) -> None:
        """Take a message of the worker about this episode."""
        if self.ended:
            return
        if isinstance(message, Ask):
            self._asked.add(message.number)
            self._events.put_nowait(message)
            return

        event = Failed(self.number, "aborted", ABORTED) if isinstance(message, Closed) else message
        self.failure = message if isinstance(message, Failed) else None
        self._ended.set()
        self._events.put_nowait(event)
        self._on_end(self)

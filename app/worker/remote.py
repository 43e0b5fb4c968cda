"""The driver's proxy of one worker process and of its jobs: start it, begin jobs, end it when it hangs or dies.

Invariants:
- Nothing that a worker sends is unpickled, and a line that is no message ends the worker.
- A worker that ends takes its process group with it, so the children of its jobs do not outlive it.
- Each of its jobs gets exactly one last message, also when the worker dies.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from app.errors import RunError
from app.utils.user_code import LoadError
from app.worker.process import WorkerProcess
from app.worker.wire import Begin, Close, Closed, Codec, Failed, Heartbeat, LineProtocol, Ready, Refused, Request, Start

SILENCE_TIMEOUT_S = 10.0  # beyond `step_timeout_s`, without a beat
CLOSE_TIMEOUT_S = 5.0  # without a beat since a job was to close at once
ABORT_TIMEOUT_S = 15.0  # beyond twice `step_timeout_s`: for a step to end, and for `close`
READ_TIMEOUT_S = 5.0  # after its last beat, in which a worker may have read a message
NO_LOG = Path(os.devnull)
ABORTED = "it was aborted"


class WorkerDied(RunError):
    """A worker died while it started."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Settings of the workers of a pool."""

    name: str  # for messages: `the environment`
    handler: str  # module whose `load` takes the settings
    settings: Mapping[str, Any]  # JSON values
    codec: Codec  # of the handler's messages
    start_timeout_s: float  # until the handler is loaded, imports of custom code included
    python: str | None = None  # interpreter; None: ours
    log: Path | None = None  # file for its output; None: stderr
    # Longest stretch of a job's own code: a worker that sends nothing for longer is killed. Infinite: a worker does not
    # beat, and the owner of its jobs has deadlines.
    step_timeout_s: float = math.inf


class State(Enum):
    """Of a worker."""

    starting = "starting"
    ready = "ready"
    retiring = "retiring"  # takes no new jobs, since code of an earlier one still runs in it
    ended = "ended"


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
    requests: set[int] = field(default_factory=set)  # that wait for an answer: none of the job's own code runs
    _messages: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def next(self) -> Any:
        """Return the next request or the final message: the result, or Failed (of kind `aborted` after an abort)."""
        return await self._messages.get()

    def reply(self, request: Request, message: Any) -> None:
        """Send the answer to a request; without effect when the job has ended."""
        self.requests.discard(request.number)
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
            self.requests.add(message.number)
            self._messages.put_nowait(message)
            return

        self.failure = message if isinstance(message, Failed) else None
        self._ended.set()
        aborted = Failed(self.number, "aborted", ABORTED)
        self._messages.put_nowait(aborted if isinstance(message, Closed) else message)
        self._on_end(self)


class RemoteWorker:
    """One worker process. Used on one event loop, whose thread outlives it (`die_with_parent`).

    Lifecycle: start → begin* → end.
    """

    def __init__(
        self, spec: WorkerSpec, on_job_end: Callable[[Job], None], on_end: Callable[["RemoteWorker"], None]
    ) -> None:
        self.state = State.starting
        self.loaded = False  # it has loaded its handler
        self.info: Mapping[str, Any] = {}  # that the handler reports about itself
        self.jobs: dict[int, Job] = {}  # that run in it, by number
        self.problem = ""  # why it ended
        self.cancelled = False  # its last jobs were to close at once: the run may need no successor
        self.process = WorkerProcess(spec.handler, spec.python, spec.log)
        self._spec = spec
        self._on_job_end = on_job_end
        self._on_end = on_end
        self._lines = LineProtocol(spec.codec, self._receive, self._died)
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._received_s = time.monotonic()

    async def start(self) -> None:
        """Start the process and load the handler.

        Raises:
            LoadError: The handler refuses its settings; its own text.
            OSError: The process cannot be started.
            RunError: The process took too long; as a `WorkerDied`, it died.
        """
        if self.state is State.ended:  # closed before it could start
            await self._started
        end = self.process.start()
        try:
            await asyncio.get_running_loop().create_connection(lambda: self._lines, sock=end)
        except BaseException:
            end.close()
            raise

        self._lines.send(Start(self._spec.settings))
        try:
            await asyncio.wait_for(asyncio.shield(self._started), self._spec.start_timeout_s)
        except TimeoutError:
            seconds = f"{self._spec.start_timeout_s:g} s"
            self.end("late", f"it did not load {self._spec.name} within {seconds}{self._see_log}")
            await self._started  # raises

    def begin(self, number: int, payload: Any) -> Job:
        """Begin a job. Called while `state` is ready."""
        if not self.jobs:
            self._received_s = time.monotonic()  # it does not beat without jobs
        job = Job(number, self._lines.send, self.end, self._job_ended)
        self.jobs[number] = job
        self._lines.send(Begin(number, payload))
        return job

    def check(self) -> None:
        """End the worker if it hangs or has died, or does not close an aborted job."""
        if self.state is State.ended or self.process.pid is None:
            return
        if self.process.has_exited():  # a child that it forked may hold its pipe
            self._died()
            return

        blocks = f"{self._spec.name} blocks its event loop or holds the GIL"
        now = time.monotonic()
        timeout_s = self._spec.step_timeout_s
        overdue = now - 2 * timeout_s - ABORT_TIMEOUT_S
        closing = [each.closing_s for each in self.jobs.values() if each.closing_s is not None]
        forced = [each.closing_s for each in self.jobs.values() if each.closing_s is not None and each.force]
        if self.jobs and now - self._received_s > timeout_s + SILENCE_TIMEOUT_S:
            silence = now - self._received_s
            self.end("late", f"the worker was silent for {silence:.0f} s: {blocks}")
        elif any(self._received_s < closing_s < now - CLOSE_TIMEOUT_S for closing_s in forced):
            self.end("late", f"{blocks}, and the run does not wait for it")
        elif any(closing_s < overdue for closing_s in closing):
            self.end("late", "an aborted job did not end")

    def end(self, kind: str, text: str) -> None:
        """Kill the process and its children. Jobs whose own code was running fail as `kind`, the others are `lost`."""
        if self.state is State.ended:
            return
        blamed = self._jobs_at_fault(kind)
        self.state = State.ended
        self.problem = text
        self.process.kill()
        self._lines.close()
        if not self._started.done():
            error = WorkerDied if kind == "died" else RunError
            self._started.set_exception(error(f"A worker of {self._spec.name} could not start: {text}."))
            self._started.exception()  # retrieved: `start` may have been cancelled

        for job in list(self.jobs.values()):
            lost = Failed(job.number, "lost", f"the worker ended while this job waited for an answer: {text}")
            job.receive(Failed(job.number, kind, text) if job in blamed else lost)
        self._on_end(self)

    def _jobs_at_fault(self, kind: str) -> list[Job]:
        """Return the jobs to blame for the worker's end: those whose own code was running.

        In a worker that fell silent, a job with a message newer than the worker's last read is not blamed, unless that
        leaves none.
        """
        own_code = [each for each in self.jobs.values() if not each.requests]
        if kind != "late":
            return own_code
        own_code = [each for each in own_code if each.sent_s <= self._received_s + READ_TIMEOUT_S] or own_code
        return own_code or list(self.jobs.values())

    def _receive(self, message: Any) -> None:
        self._received_s = time.monotonic()
        match message:
            case Ready():
                self.info = message.info
                self.state = State.ready
                self.loaded = True
                self._started.set_result(None)
            case Refused():
                self._started.set_exception(LoadError(message.text))
                self.end("died", message.text)
            case Heartbeat():
                pass
            case _:
                if getattr(message, "stuck", False) and self.state is State.ready:
                    self.state = State.retiring
                    self.problem = "code of an earlier job does not end"
                if (job := self.jobs.get(message.job)) is not None:
                    job.receive(message)

    def _job_ended(self, job: Job) -> None:
        del self.jobs[job.number]
        self.cancelled = job.force
        self._on_job_end(job)
        if self.state is State.retiring and not self.jobs:
            self.end("late", self.problem)

    def _died(self, error: Exception | None = None) -> None:
        reason = "" if error is None else f"; it wrote to the worker's pipe: {error}"
        self.end("died", f"the worker process died{self.process.end()}{reason}{self._see_log}")

    @property
    def _see_log(self) -> str:
        return "" if self._spec.log in (None, NO_LOG) else f"; log: {self._spec.log}"

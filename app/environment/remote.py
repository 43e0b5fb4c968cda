"""The driver's proxy of one worker process: start it, begin episodes in it, and end it when it hangs or dies.

Invariants:
- Nothing that a worker sends is unpickled, and a line that is no message ends the worker.
- A worker that ends takes its process group with it, so the children of its environments do not outlive it.
- Each of its episodes gets exactly one end, also when the worker dies.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from app.environment.environment_process import EnvironmentProcess, WorkerSpec
from app.environment.episode_session import EpisodeSession
from app.environment.protocol import Task
from app.environment.wire import (
    Ask,
    Begin,
    Closed,
    End,
    Failed,
    FromDriver,
    Lines,
    Ready,
    Refused,
    Start,
    WireError,
)
from app.errors import ConfigError, RunError
from app.utils.child_process import exit_text

START_LIMIT_S = 120.0  # includes the imports of the environment
SILENCE_S = 10.0  # beyond environment.timeout_s, without a beat
AT_ONCE_S = 5.0  # without a beat since an episode was to close at once
ABORT_LIMIT_S = 15.0  # beyond twice environment.timeout_s: for a step to end, and for `close`
READ_S = 5.0  # after its last beat, in which a worker may have read a message


class State(Enum):
    """Of a worker."""

    starting = "starting"
    ready = "ready"
    retiring = "retiring"  # takes no new episodes, since code of an earlier one still runs in it
    ended = "ended"


class EnvironmentWorker:
    """One worker process. Used on one event loop, whose thread outlives it (`die_with_parent`).

    Lifecycle: start → begin* → end.

    Args:
        spec: What it runs.
        log: File for its output (None: stderr).
        on_episode_end: Called when an episode has ended.
        on_end: Called when the worker has.

    Attributes:
        state: What it does.
        loaded: It has loaded the environment.
        info: What the environment says about itself.
        sessions: The episodes that run in it, by number.
        problem: Why it ended.
        cancelled: Its last episodes were to close at once, so that the run may not need a successor.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        log: Path | None,
        on_episode_end: Callable[[EpisodeSession], None],
        on_end: Callable[["EnvironmentWorker"], None],
    ) -> None:
        self.state = State.starting
        self.loaded = False
        self.info: Mapping[str, Any] = {}
        self.sessions: dict[int, EpisodeSession] = {}
        self.problem = ""
        self.cancelled = False
        self._spec = spec
        self._log = log
        self._on_episode_end = on_episode_end
        self._on_end = on_end
        self._process = EnvironmentProcess(spec.python, log)
        self._lines = Lines(self._receive, self._pipe_ended)
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard_s = time.monotonic()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def start(self) -> None:
        """Start the process and load the environment.

        Raises:
            ConfigError: The environment cannot be loaded; its own sentence.
            RunError: The process died or took too long.
        """
        end = self._process.start()
        try:
            await asyncio.get_running_loop().create_connection(lambda: self._lines, sock=end)
        except BaseException:
            end.close()
            raise

        spec = dataclasses.asdict(self._spec)
        self._lines.send(Start({name: spec[name] for name in ("environment", "renderer", "limits", "memory_gib")}))
        try:
            await asyncio.wait_for(asyncio.shield(self._answer), START_LIMIT_S)
        except TimeoutError:
            self.end("late", f"it did not load the environment within {START_LIMIT_S:g} s{self._see_log}")
            await self._answer  # raises

    def begin(self, number: int, task: Task, prompt_ids: Sequence[int]) -> EpisodeSession:
        """Begin an episode. Called while `state` is ready."""
        if not self.sessions:
            self._heard_s = time.monotonic()  # it does not beat without episodes
        session = EpisodeSession(number, task.id, self, self._session_ended)
        self.sessions[number] = session
        fields = {each.name: getattr(task, each.name) for each in dataclasses.fields(task)}
        self._lines.send(Begin(number, fields, prompt_ids))
        return session

    def send(self, message: FromDriver) -> None:
        """Send a message to the worker; without effect when it has ended."""
        self._lines.send(message)

    def check(self) -> None:
        """End the worker if it hangs or has died, or does not close an aborted episode."""
        if self.state is State.ended or self._process.pid is None:
            return
        if self._process.has_exited():  # a child that it forked may hold its pipe
            self._died("")
            return

        now = time.monotonic()
        timeout_s = self._spec.limits.timeout_s
        overdue = now - 2 * timeout_s - ABORT_LIMIT_S
        if self.sessions and now - self._heard_s > timeout_s + SILENCE_S:
            silence = now - self._heard_s
            self.end(
                "late",
                f"the worker was silent for {silence:.0f} s: the environment blocks its event loop or holds the GIL",
            )
        elif any(self._ignores(each, now) for each in self.sessions.values()):
            self.end("late", "the environment blocks its event loop or holds the GIL, and the run does not wait for it")
        elif any(each.closing_s is not None and each.closing_s < overdue for each in self.sessions.values()):
            self.end("late", "an aborted episode did not end")

    def end(self, kind: str, text: str) -> None:
        """Kill the process and its children. Its episodes end as Failed.

        Args:
            kind: Of the failure of the episodes whose own code was running. The others are `lost`.
            text: Why, as a sentence without its period.
        """
        if self.state is State.ended:
            return
        blamed = self._blamed(kind)
        self.state = State.ended
        self.problem = text
        self._process.kill()
        self._lines.close()
        if not self._answer.done():
            self._answer.set_exception(RunError(f"An environment worker could not start: {text}."))
            self._answer.exception()  # retrieved: `start` may have been cancelled

        for session in list(self.sessions.values()):
            failure = Failed(session.number, kind, text)
            if session not in blamed:
                failure = Failed(
                    session.number, "lost", f"the worker ended while the episode waited for an engine: {text}"
                )
            session.receive(failure)
        self._on_end(self)

    def reap(self) -> None:
        """Wait for the killed process, blocking: milliseconds, unless much memory is freed."""
        self._process.reap()

    def _ignores(self, session: EpisodeSession, now: float) -> bool:
        """Whether the worker has been silent since this episode was to close at once."""
        if not session.at_once or session.closing_s is None:
            return False
        return self._heard_s < session.closing_s < now - AT_ONCE_S

    def _blamed(self, kind: str) -> list[EpisodeSession]:
        """Return the episodes to blame for the worker's end: those whose own code was running.

        If all of them waited for an engine, something else killed the worker. In a worker that fell silent, an episode
        whose last message is newer than the worker's last read is not blamed, unless that leaves none.
        """
        own_code = [each for each in self.sessions.values() if not each.waits]
        if kind != "late":
            return own_code
        own_code = [each for each in own_code if each.told_s <= self._heard_s + READ_S] or own_code
        return own_code or list(self.sessions.values())

    def _receive(self, message: Any) -> None:
        self._heard_s = time.monotonic()
        match message:
            case Ready():
                self.info = message.info
                self.state = State.ready
                self.loaded = True
                self._answer.set_result(None)
            case Refused():
                self._answer.set_exception(ConfigError(message.text))
                self.end("died", message.text)
            case Ask() | End() | Failed() | Closed():
                self._route(message)

    def _route(self, message: Ask | End | Failed | Closed) -> None:
        if isinstance(message, Failed | Closed) and message.stuck and self.state is State.ready:
            self.state = State.retiring
            self.problem = "code of an episode does not end"
        session = self.sessions.get(message.episode)
        if session is not None:
            session.receive(message)

    def _session_ended(self, session: EpisodeSession) -> None:
        del self.sessions[session.number]
        self.cancelled = session.at_once
        self._on_episode_end(session)
        if self.state is State.retiring and not self.sessions:
            self.end("late", self.problem)

    def _pipe_ended(self, error: WireError | None) -> None:
        if error is None:
            self._died("")
        else:
            self._died(f"; it wrote to the worker's pipe: {error}")

    def _died(self, reason: str) -> None:
        code = self._process.end()
        self.end("died", f"the worker process died{exit_text(code)}{reason}{self._see_log}")

    @property
    def _see_log(self) -> str:
        return "" if self._log is None else f"; log: {self._log}"

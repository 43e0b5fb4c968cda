"""One episode in a worker: make the environment, run it, close it, and report how it ended.

    make → run (begin, step*, score) → close
             ↑ late, aborted: cancelled

Invariants:
- `play` returns exactly one End, Failed or Closed.
- `close` of an environment that was made is called exactly once, whatever happened before.
"""

import asyncio
import dataclasses
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from app.environment.kinds import Make
from app.environment.own import WrongValue, check_methods, run_steps, score_of, scores_of, short
from app.environment.protocol import EpisodeOver, Message, Renderer, Task
from app.environment.wire import End, Limits
from app.environment.worker.calls import Calls, Clock, Exited
from app.environment.worker.policy import AskEngine, EpisodePolicy
from app.utils.user_code import LoadError, error_text
from app.worker.process import log
from app.worker.wire import Begin, Closed, Failed

CANCEL_TIMEOUT_S = 5.0  # for code that was cancelled to end
RUN_END_TIMEOUT_S = 1.0  # for the same, and for a call in a thread, where the run itself ends
CHECK_TIMEOUT_S = 1.0  # between two looks at the clock, which stops while an engine is awaited


def opening_of(task: Task, framing: Mapping[str, Any]) -> list[Message]:
    """Return the conversation that an episode opens with. The driver has framed one that is of the data.

    `framing` may have text before and after a question, `prefix` and `suffix`, and its `system` message.
    """
    if task.messages:
        return list(task.messages)
    user = {"role": "user", "content": framing.get("prefix", "") + task.question + framing.get("suffix", "")}
    system = framing.get("system")
    return [user] if system is None else [{"role": "system", "content": system}, user]


class Episode:
    """Plays one episode. `ask` generates a continuation; `url` returns the base URL of an episode's policy."""

    def __init__(
        self,
        begin: Begin,
        make: Make,
        ask: AskEngine,
        renderer: Renderer,
        limits: Limits,
        framing: Mapping[str, Any],
        url: Callable[[EpisodePolicy], str],
    ) -> None:
        self.number = begin.job
        self._task = Task(**begin.payload["task"])
        self._make = make
        self._limits = limits
        self._clock = Clock(limits.timeout_s)
        self._calls = Calls()
        opening = opening_of(self._task, framing)
        self.policy = EpisodePolicy(ask, renderer, limits, opening, begin.payload["prompt"], self._clock, url)
        self._environment: Any = None
        self._aborted = asyncio.Event()
        self._force = False
        self._stuck = False

    def abort(self, *, force: bool = False) -> None:
        """End the episode without a score. `force`: without waiting for a call in its thread."""
        self._force = force
        self._aborted.set()

    async def play(self) -> End | Failed | Closed:
        if self._aborted.is_set():
            return Closed(self.number)
        running = asyncio.ensure_future(self._run())
        outcome = await self._outcome(running)
        self.policy.close()

        failure = await self._close()
        if failure is not None and isinstance(outcome, End):
            outcome = failure
        self._calls.end()
        stuck = self._stuck or getattr(self._environment, "stuck", False)
        return dataclasses.replace(outcome, stuck=True) if stuck else outcome

    async def _outcome(self, running: "asyncio.Future[End]") -> End | Failed | Closed:
        """Return how the run ended, after it has."""
        late: asyncio.Future[Any] = asyncio.ensure_future(self._late())
        aborted: asyncio.Future[Any] = asyncio.ensure_future(self._aborted.wait())
        await asyncio.wait([running, late, aborted], return_when=asyncio.FIRST_COMPLETED)
        aborted.cancel()
        late.cancel()

        if running.done():
            return self._failure(running, self._clock.step) or running.result()
        if self._aborted.is_set():
            self.policy.close()  # for a thread that waits for a reply
            await self._cancel(running, RUN_END_TIMEOUT_S if self._force else self._limits.timeout_s)
            return Closed(self.number)
        step = self._clock.step
        await self._cancel(running, 0.0)
        return self._too_late(step)

    async def _late(self) -> None:
        """Return when a stretch of the environment's own code has taken too long."""
        left = self._clock.left
        while left > 0:
            await asyncio.sleep(min(left, CHECK_TIMEOUT_S))
            # a `run` may have limits of its own, such as that each tool of a turn may take `timeout_s`
            limits_itself = self._clock.step == "run" and getattr(self._environment, "limits_itself", False)
            left = CHECK_TIMEOUT_S if limits_itself else self._clock.left

    async def _cancel(self, running: "asyncio.Future[Any]", thread_s: float) -> None:
        """Cancel a run, and give a call in its thread so much time to end."""
        running.cancel()
        await asyncio.wait({running}, timeout=RUN_END_TIMEOUT_S if self._force else CANCEL_TIMEOUT_S)
        if not running.done():
            self._stuck = True
        elif not running.cancelled():
            running.exception()  # retrieved: the run has an outcome already

        if not await self._calls.until_idle(thread_s):
            self._stuck = True
            self._calls.end()

    async def _run(self) -> End:
        await self._call(self._construct)
        run = getattr(self._environment, "run", None)
        if run is None:
            try:
                check_methods(self._environment)
            except LoadError as error:
                made = f"the environment that was made is {short(self._environment)}"
                raise WrongValue(f"{made}: {error}") from error
            run = partial(run_steps, self._environment, self._call)

        self._clock.begin("run")
        try:
            value = await self._calls(run, self._task, self.policy)
        except Exception as error:
            if not self._is_a_limit(error):
                raise
            value = await score_of(self._environment, self._call)
            value = 0.0 if value is None else value

        ending = self.policy.ending or ("length" if self.policy.truncated else "stop")
        own_metrics = getattr(self._environment, "metrics", None) or {}
        metrics = {**self.policy.metrics, **scores_of(own_metrics), "seconds": self._clock.seconds}
        return End(self.number, scores_of(value), ending, self.policy.turns, self.policy.text, metrics)

    def _is_a_limit(self, error: BaseException) -> bool:
        """Whether an error, its cause, or each of a task group's is a limit that the policy reached."""
        from app.environment.worker.openai_endpoint.openai_api import is_bad_request

        if isinstance(error, BaseExceptionGroup):
            return all(map(self._is_a_limit, error.exceptions))
        if isinstance(error, EpisodeOver) or (self.policy.ending and is_bad_request(error)):
            return True
        return error.__cause__ is not None and self._is_a_limit(error.__cause__)

    def _construct(self) -> None:
        """Make the environment, in its thread: it is closed even if the episode has been aborted by then."""
        self._environment = self._make()

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        name = "the constructor" if function == self._construct else getattr(function, "__name__", "run")
        self._clock.begin(name)
        return await self._calls(function, *args)

    async def _close(self) -> Failed | None:
        """Call the environment's `close`, if there is one; return how that failed."""
        close = getattr(self._environment, "close", None)
        if close is None:
            return None

        closing = asyncio.ensure_future(self._calls(close))
        await asyncio.wait({closing}, timeout=RUN_END_TIMEOUT_S if self._force else self._limits.timeout_s)
        if not closing.done():
            await self._cancel(closing, 0.0)
            return self._too_late("close")
        return self._failure(closing, "close")

    def _too_late(self, step: str) -> Failed:
        text = f"{step} took longer than {self._limits.timeout_s:g} s, see environment.timeout_s"
        return Failed(self.number, "late", text)

    def _failure(self, ended: "asyncio.Future[Any]", step: str) -> Failed | None:
        """Return how user code that has ended failed, None if it did not; its traceback goes to the log."""
        if ended.cancelled():
            return Failed(self.number, "raised", f"{step} raised CancelledError")
        error = ended.exception()
        if error is None:
            return None
        if isinstance(error, WrongValue):
            return Failed(self.number, "value", str(error))
        trace = "".join(traceback.format_exception(error))
        log(f"episode {self.number} of {self._task.id}: {step} raised\n{trace}")
        kind = "memory" if isinstance(error, MemoryError) else "raised"
        error = error.__cause__ or error if isinstance(error, Exited) else error
        return Failed(self.number, kind, f"{step} raised {error_text(error)}")

"""The worker processes of one reward component.

Invariants:
- A call ends within its deadline, plus the wait for a free worker.
- After a call for several trajectories fails, each is scored again, alone, so that only the offending one fails.
- After a worker died, its trajectories are scored again: another cause than the reward may have killed it.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from app.errors import RunError
from app.reward.component import Failure, FailureKind, Outcome, RewardComponent, Value
from app.reward.handler import CODEC, Scored, pickled, unpack
from app.types import Trajectory
from app.worker.pool import WorkerPool
from app.worker.remote import WorkerSpec

START_TIMEOUT_S = 60.0  # includes the imports of custom rewards
SLOW_WARNING_S = 10.0  # a call without a result is reported, long before its deadline
CLOSED = Failure(FailureKind.died, "the scorer was closed")


class RewardPool(WorkerPool):
    """Scores trajectories with one component; each worker process has one call at a time.

    Lifecycle: start_workers → score* → close. `warn` is called when for the first time a call is slow, or its
    trajectories are scored again.
    """

    def __init__(
        self,
        component: RewardComponent,
        *,
        workers: int,
        timeout_s: float,
        log: Path | None,
        warn: Callable[[str], None],
    ) -> None:
        settings = {"component": pickled(component)}
        handler = f"{__package__}.handler"
        spec = WorkerSpec(f"the reward {component.name}", handler, settings, CODEC, START_TIMEOUT_S, log=log)
        super().__init__(spec, workers=workers, jobs=1, warn=self._write_to_log)
        self.component = component
        self.retried = 0  # trajectories that were scored again, alone
        self._timeout_s = component.deadline_s(timeout_s)  # per trajectory
        self._warn_user = warn
        self._warned: set[str] = set()
        self._calls: set[asyncio.Task[Outcome]] = set()

    async def score(self, trajectories: Sequence[Trajectory]) -> Outcome:
        """Return a value or a failure for each trajectory. Raises `RunError` if no worker can be started any more.

        When the caller is cancelled, the call goes on in its worker until its deadline.
        """
        call = asyncio.create_task(self._score(trajectories))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def call(
        self, trajectories: Sequence[Trajectory], timeout_s: float, slow_after_s: float, on_slow: Callable[[], None]
    ) -> Outcome:
        """Score trajectories once, within `timeout_s`; call `on_slow` after `slow_after_s`. Raises as `score`."""
        try:
            job = await self.begin_job(pickled(trajectories))
        except RunError:
            if self.closed:
                return CLOSED
            raise

        late = f"no result for {len(trajectories)} completion(s) within {timeout_s:g} s, see reward.timeout_s"
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(slow_after_s, on_slow), loop.call_later(timeout_s, job.kill, "late", late)]
        try:
            message = await job.next()
        finally:
            for timer in timers:
                timer.cancel()

        if isinstance(message, Scored):
            outcome: Outcome = unpack(message.outcome)
            return outcome
        if self.closed:
            return CLOSED
        return Failure(FailureKind.timeout if message.kind == "late" else FailureKind.died, message.text)

    async def _score(self, trajectories: Sequence[Trajectory]) -> Outcome:
        outcome = await self._call(trajectories)
        if self.closed or not isinstance(outcome, Failure):
            return outcome
        alone = len(trajectories) == 1
        if alone and outcome.kind is not FailureKind.died:
            return outcome

        count = "1 trajectory" if alone else f"{len(trajectories)} trajectories"
        again = f"failed on a call for {count} ({outcome}); each of them is scored again, alone."
        self._warn_once("again", again)
        self.retried += len(trajectories)
        values: list[Value] = []
        for trajectory in trajectories:
            single = await self._call([trajectory])
            values.extend([single] if isinstance(single, Failure) else single)
        return values

    async def _call(self, trajectories: Sequence[Trajectory]) -> Outcome:
        timeout_s = self._timeout_s * len(trajectories)
        slow = (
            f"has no result for {len(trajectories)} trajectories after {SLOW_WARNING_S:g} s; it has {timeout_s:g} s "
            "(reward.timeout_s). reward.workers processes score as many groups at a time."
        )
        return await self.call(trajectories, timeout_s, SLOW_WARNING_S, lambda: self._warn_once("slow", slow))

    def _warn_once(self, event: str, text: str) -> None:
        if event not in self._warned:
            self._warned.add(event)
            self._warn_user(f"reward component {self.component.name} {text}")

    def _write_to_log(self, text: str) -> None:
        """Add what a worker could not log itself: why it was replaced."""
        if self.spec.log is not None:
            with self.spec.log.open("a", encoding="utf-8") as log:
                log.write(f"{text}\n")

"""The base of both schedules: phases, scoring, evaluation, the commit of a step, checkpoints.

Invariants:
    - A step counts once the trainer has finished it. It is committed as a whole, after its weight sync or when the run
      ends before: metrics, prompt ids, cursor; then, when due, a checkpoint of exactly that state. Wherever a run
      resumes, every earlier prompt was trained on or filtered exactly once, and every other prompt is still to come.
    - `version` is the number of committed steps, which is the policy version synced last.
    - A step that fails ends the schedule with a `TrainerError`. `app/mode/train.py` saves the step before, if the
      trainer can still be read, and starts the ranks again.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from app.algorithm.advantage import score
from app.algorithm.filter import RolloutCounts
from app.checkpoint.run_state import RunState
from app.errors import RunError, TrainerError
from app.eval import evaluate, is_due
from app.placement.context import RunContext
from app.placement.step_metrics import step_metrics
from app.placement.watchdog import watchdog
from app.types import Group, InFlight, ScoredGroup, StepReport, SyncReport
from app.utils.files import describe
from app.utils.tasks import in_thread

CURSOR, DEMONSTRATIONS = "cursor", "demonstrations"  # in `RunState.extra`
EMPTY_STEPS = 3  # consecutive steps without a group; then the run ends


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step between the trainer's last call and its commit."""

    step: int
    report: "asyncio.Future[StepReport]"
    scored: Sequence[ScoredGroup] = ()
    counts: RolloutCounts = field(default_factory=RolloutCounts)


class PlacementController(ABC):
    """Base of `Colocate` and `FullyAsync`."""

    def __init__(self, context: RunContext, version: int = 0, *, evaluation_due: bool = False):
        self.context = context
        self.config = context.config
        self.version = version
        self.evaluation_due = evaluation_due or (version == 0 and self.config.eval.before_train)  # of this version
        self.accuracy = 0.0  # of the last evaluation
        self._evaluated: int | None = None  # the version of the last evaluation
        self.current_phase = "start"
        self.seconds: dict[str, float] = {}  # of the phases of the current step
        self.microbatch_s = 0.0  # of the longest microbatch so far
        self._pending: PendingStep | None = None
        self._empty_steps: dict[int, RolloutCounts] = {}  # the last ones, without a group, in a row

    async def run(self) -> float:
        """Train to the last step; returns the last evaluation's accuracy. Raises `RunError` without progress."""
        async with watchdog(self, self.context.pool, self.config, self.context.recorder.folder):
            await self._run()
        return self.accuracy

    @abstractmethod
    async def _run(self) -> None:
        """Sync the initial policy, evaluate it and make every step."""

    @property
    def finished(self) -> bool:
        """Whether the last step is done, or an evaluation ends the run early."""
        return self.version >= self.config.steps or self.context.recorder.stop_reason is not None

    # --- phases

    @asynccontextmanager
    async def phase(
        self, name: str, *, step: int | None = None, track: str = "driver", record_memory: bool = True
    ) -> AsyncIterator[None]:
        """Measure a phase of a step: its seconds, its span on the timeline and the ranks' device-memory peak."""
        outer = self.current_phase
        self.current_phase = name
        started = time.perf_counter()
        try:
            with self.context.recorder.timeline.span(track, name, step=self.version + 1 if step is None else step):
                yield
            if record_memory:
                await self.context.memory.record_peaks(name)
        finally:
            self.current_phase = outer
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def _step_seconds(self) -> dict[str, float]:
        return {"step": sum(self.seconds.values()), **self.seconds}

    # --- within a step

    def score(self, group: Group) -> ScoredGroup:
        return score(group, self.config.algorithm, max_completion_tokens=self.config.rollout.max_completion_tokens)

    def require_groups(self, groups: int, counts: RolloutCounts) -> None:
        """Raise `RunError` when several steps in a row had no groups to train on. `counts`: those of the open step."""
        self._empty_steps = {} if groups else {**self._empty_steps, self.version + 1: counts}
        if len(self._empty_steps) >= EMPTY_STEPS:
            raise _nothing_to_train_on(self._empty_steps.values(), self.context.rollouter.last_failure)

    async def finish_step(self, step: int, scored: Sequence[ScoredGroup], counts: RolloutCounts) -> None:
        """Add the step's demonstrations and finish it. Without groups make no update.

        Raises `RunError` if an engine does not sample with the trainer's weights.
        """
        if not scored:
            await self.context.trainer.abort_step()
            report: asyncio.Future[StepReport] = asyncio.get_running_loop().create_future()
            report.set_result(StepReport(step, 0, {}))
            self._pending = PendingStep(step, report, (), counts)
            return

        if self.context.probe.running:
            with self.context.recorder.timeline.span("trainer", "compare with engines", step=step):
                await self.context.probe.check(self.context.trainer)

        if (demonstrations := self.context.demonstrations) is not None:
            await self.context.trainer.add_demonstrations(demonstrations.of_step(step))
        await self.finish_open_step(step, scored, counts)

    async def finish_open_step(
        self, step: int, scored: Sequence[ScoredGroup] = (), counts: RolloutCounts | None = None
    ) -> None:
        """Finish the open step, which is pending from then on.

        A cancellation leaves the trainer's call in progress: `commit` awaits its report.
        """
        async with self.context.weight_sync.updating(step):
            finishing = asyncio.ensure_future(self.context.trainer.finish_step())
            finishing.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._pending = PendingStep(step, finishing, scored, counts or RolloutCounts())
            report = await asyncio.shield(finishing)

        self.microbatch_s = max(self.microbatch_s, report.metrics.get("time/microbatch_max", 0.0))
        # Requests that continued in place keep the KV cache of older policies, which differs for a good reason.
        if self.config.placement.in_flight is not InFlight.in_place:
            self.context.probe.saw(report.metrics.get("mismatch/kl_same_version"))

    async def sync(self, version: int) -> SyncReport:
        """Sync the weights and add the sync's phases, which are consecutive, to the timeline."""
        timeline = self.context.recorder.timeline
        with timeline.span("driver", "sync weights", step=version):
            report = await self.context.weight_sync.sync(version)

        begin = timeline.now() - report.seconds["total"]
        for phase, seconds in report.seconds.items():
            if phase != "total":
                timeline.add("driver", phase, begin, begin + seconds, {"step": version})
                begin += seconds
        return report

    def _idle_shares(self, seconds: Mapping[str, float]) -> Mapping[str, float]:
        """Return the shares of the step's seconds in which trainer and engines had nothing to do."""
        return {}

    async def commit(self, sync: SyncReport | None = None) -> None:
        """Record the pending step and mark its prompts as consumed. `sync` is None if the run ends before the sync."""
        assert self._pending is not None
        pending = self._pending
        seconds = self._step_seconds()  # before the wait for the report
        report = await pending.report
        groups = [each.group for each in pending.scored]
        counts, rollouter = pending.counts, self.context.rollouter

        sync = sync or SyncReport(pending.step, 0, 0, {})
        in_flight = self.config.placement.in_flight_or_default()
        metrics = step_metrics(
            pending.scored, counts, report, sync, seconds, trained_version=self.version, in_flight=in_flight
        )
        metrics |= {**self._idle_shares(seconds), **rollouter.scorer.metrics, **rollouter.failure_metrics}
        metrics |= self.context.concurrency.end_step(rollouter.requests)
        if not self.config.algorithm.reward_coefficient:
            metrics.pop("reward/zero_std_fraction", None)  # equal rewards are no problem without their advantages

        trained = [group.prompt.id for group in groups]
        filtered = [group.prompt.id for group in counts.filtered] + counts.unplayable
        self.context.recorder.log_samples(pending.step, groups, rollouter.tokenizer.decode)
        await self.record(metrics, trained=trained, filtered=filtered, unplayable=counts.unplayable)

    async def commit_finished(self) -> None:
        """Before the run ends: commit the pending step, if the trainer has finished it.

        No step may be open. Raises `TrainerError` if the parameters are not those of the last committed step.
        """
        version = await self.context.trainer.version()
        if self._pending is not None and version == self._pending.step:
            await self.commit()
        elif version is None or version > self.version:
            raise TrainerError("the next update had already changed the parameters")

    async def record(
        self,
        metrics: Mapping[str, float],
        *,
        trained: Sequence[str],
        filtered: Sequence[str] = (),
        unplayable: Sequence[str] = (),
    ) -> None:
        """Record the metrics of the pending step and the ids of its prompts, which are consumed by it."""
        assert self._pending is not None
        context, step = self.context, self._pending.step
        restarts = {"recovery/engine_restarts": float(context.supervisor.restarts)}
        metrics = {**metrics, **await context.memory.sample(), **restarts, **context.checkpoints.metrics}
        with _recording(f"step {step}"):
            context.recorder.log(step, metrics)
            context.recorder.log_prompts(step, trained=trained, filtered=filtered, unplayable=unplayable)
        context.cursor.mark_consumed([*trained, *filtered])

        self.version = step
        self._pending = None
        self.evaluation_due = is_due(self.config.eval, step=step, last_step=self.config.steps)

    # --- around steps

    async def evaluate_first(self) -> None:
        """Evaluate the initial policy, if `eval.before_train`, or the step whose evaluation was interrupted."""
        if not self.evaluation_due:
            return
        policy = f"step {self.version}" if self.version else "the initial policy"
        self.context.recorder.status(f"evaluating {policy}")
        await self._evaluate()
        if self.version:
            await in_thread(self.context.checkpoints.set_accuracy, self.accuracy)

    async def after_step(self) -> None:
        """Evaluate and save when due. Raises `RunError` when too many rewards failed or memory is nearly full."""
        self.context.rollouter.scorer.check()
        if self.evaluation_due:
            await self._evaluate()

        config = self.config.checkpoint
        due = self.context.checkpoints.due(self.version, self._accuracy_now, config)
        if config.keep and (self.finished or due):
            await self.save()
        self.context.memory.check()

    @property
    def _accuracy_now(self) -> float | None:
        return self.accuracy if self._evaluated == self.version else None

    async def save(self) -> None:
        """Save a checkpoint of the last committed step. Training waits until the state is captured."""
        context, seconds = self.context, self.config.trainer.timeout_s
        data: dict[str, Any] = {CURSOR: context.cursor.state()}
        if context.demonstrations is not None:
            data[DEMONSTRATIONS] = context.demonstrations.fingerprint
        state = RunState(self.version, self.version, data, context.model, self._accuracy_now, self.evaluation_due)

        with context.recorder.timeline.span("driver", "checkpoint", step=self.version):
            try:
                await asyncio.wait_for(in_thread(context.recorder.flush), seconds)
            except TimeoutError:
                late = f"were not flushed to disk within trainer.timeout_s={seconds:g} s"
                raise RunError(f"the metrics of step {self.version} {late}") from None
            await context.checkpoints.save(context.trainer, state)

    async def _evaluate(self) -> None:
        async with self.phase("evaluate", step=self.version, record_memory=False):
            await self._run_evaluation()

    async def _run_evaluation(self) -> None:
        """Sample and record the evaluation of the current version, which must not change meanwhile."""
        context = self.context
        results, groups = await self._sample_evaluation()
        with _recording(f"the evaluation after step {self.version}"):
            context.recorder.log_eval(self.version, results, groups, context.rollouter.tokenizer.decode)
        self.accuracy = sum(metrics["accuracy"] for metrics in results.values()) / len(results)
        self._evaluated = self.version
        self.evaluation_due = False

    async def _sample_evaluation(self) -> tuple[dict[str, dict[str, float]], list[Group]]:
        return await evaluate(self.context.rollouter, self.context.evals, self.config, self.version)

    # --- for the watchdog

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes with every finished group and every call that returns."""
        return *self.context.rollouter.progress, self.context.trainer.calls

    def describe(self) -> str:
        return f"step {self.version + 1}, phase {self.current_phase}: {self.context.rollouter.describe()}"


def _nothing_to_train_on(empty: Collection[RolloutCounts], last_failure: str) -> RunError:
    """Return the error of steps without a group, with what became of theirs."""
    filtered = sum(len(each.filtered) for each in empty)
    unplayable = sum(len(each.unplayable) for each in empty)
    causes = []
    if unplayable:
        causes.append(
            f"{unplayable} groups were unplayable, since episodes failed in every attempt and left too few "
            f"members (the last: {last_failure}); see logs/environment.log"
        )
    if filtered:
        causes.append(
            f"dynamic sampling filtered {filtered} groups, since all rewards of each were equal: use harder or "
            "easier problems, or algorithm.dynamic_sampling=false"
        )
    return RunError(f"{EMPTY_STEPS} steps in a row had no group to train on: {'; '.join(causes)}.")


@contextmanager
def _recording(what: str) -> Iterator[None]:
    """Raise `RunError` if the metrics cannot be written: what cannot be recorded must not be trained on."""
    try:
        yield
    except OSError as error:
        raise RunError(f"the metrics of {what} cannot be written: {describe(error)}") from error

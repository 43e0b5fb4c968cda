"""What both placements do alike around the trainer: score, evaluate, commit, save, try a failed step again.

A step is committed in one go: its line, its prompts in the ledger, the cursor that will not hand them out again; then,
when it is due, a checkpoint of exactly that. So whatever a resumed run starts from, each prompt before it was trained
on once, or filtered, and each other one is still to come.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from app.algorithm.advantage import score
from app.checkpoint.manager import RunState
from app.errors import RunError, TrainerError, TrainerLost
from app.eval.evaluate import evaluate
from app.placement.context import RunContext
from app.types import Group, ScoredGroup, StepReport, SyncReport

ABORT_SECONDS = 30.0  # for a trainer that has failed: it may be gone
CURSOR = "cursor"
EMPTY_STEPS = 3  # in a row; then the run says that nothing can be learnt


class PlacementController(ABC):
    """Shared by `Colocate` and `FullyAsync`; `version` is the policy that was pushed last, after as many steps."""

    def __init__(self, parts: RunContext, version: int = 0):
        self.parts, self.version = parts, version
        self.config = parts.config
        self.accuracy = 0.0  # of the last evaluation
        self._empty = 0
        self._failures = 0  # of the trainer, without any step between

    @abstractmethod
    async def run(self) -> float:
        """Train to the last step; returns the last evaluation's accuracy."""

    def scored(self, group: Group) -> ScoredGroup:
        return score(group, self.config.algorithm, max_completion_tokens=self.config.rollout.max_completion_tokens)

    @property
    def finished(self) -> bool:
        return self.version >= self.config.steps

    async def evaluate_first(self) -> None:
        if self.config.eval.before_train and self.version == 0:
            await self._evaluate()

    async def evaluate_if_due(self) -> None:
        """After every `eval.every` steps, and after the last."""
        every = self.config.eval.every
        if self.finished or (every > 0 and self.version % every == 0):
            await self._evaluate()

    def require_groups(self, groups: int) -> None:
        """Raise `RunError` when several steps in a row had nothing to train on."""
        self._empty = 0 if groups else self._empty + 1
        if self._empty >= EMPTY_STEPS:
            raise RunError(
                f"{EMPTY_STEPS} steps in a row had no group to train on: dynamic sampling found the rewards of every "
                "group equal, so nothing can be learnt from this data any more. Harder or easier problems, or "
                "algorithm.dynamic_sampling=false, would change that."
            )

    async def finish_step(self, step: int, groups: int) -> StepReport:
        """Finish the open step; one that dynamic sampling left without any group makes no update."""
        if groups:
            async with self.parts.sync.updating(step):
                return await self.parts.trainer.finish_step()
        await self.parts.trainer.abort_step()
        return StepReport(step, 0, {})

    async def push(self, version: int) -> SyncReport:
        """Push, and put its phases on the timeline: they follow each other."""
        timeline = self.parts.recorder.timeline
        with timeline.span("driver", "push", step=version):
            report = await self.parts.sync.sync(version)
        begin = timeline.now() - report.seconds["total"]
        for phase, seconds in report.seconds.items():
            if phase != "total":
                timeline.add("driver", phase, begin, begin + seconds, {"step": version})
                begin += seconds
        return report

    async def commit(
        self, step: int, groups: Sequence[Group], filtered: Sequence[Group], line: Mapping[str, float]
    ) -> None:
        """The step is done: record it and settle its prompts. Raises `RunError` when too many rewards failed."""
        parts, ids = self.parts, [[group.prompt.id for group in each] for each in (groups, filtered)]
        recorder, scorer = parts.recorder, parts.rollouter.scorer
        memory = await parts.memory.sample()
        restarts = {"recovery/engine_restarts": float(parts.sync.restarts)}
        recorder.samples(step, groups, parts.rollouter.tokenizer.decode)
        recorder.log(step, {**line, **scorer.metrics, **memory, **restarts, **parts.checkpoints.metrics})
        recorder.prompts(step, trained=ids[0], filtered=ids[1])
        parts.cursor.settle([*ids[0], *ids[1]])
        self.version, self._failures = step, 0
        scorer.check()

    async def after_step(self) -> None:
        """Evaluate and save when it is time to, and end the run before the machine's memory does."""
        await self.evaluate_if_due()
        every = self.config.checkpoint.every
        if every and (self.finished or self.version % every == 0):
            await self.save()
        try:
            self.parts.memory.check()
        except RunError:
            if every:
                await self.save()
            raise

    async def save(self) -> None:
        """A checkpoint of the last committed step; training waits until it is captured."""
        parts = self.parts
        state = RunState(self.version, self.version, {CURSOR: parts.cursor.state()}, parts.model)
        with parts.recorder.timeline.span("driver", "checkpoint", step=self.version):
            await parts.checkpoints.save(parts.trainer, state)

    async def leave(self) -> None:
        """The run was asked to stop: save what is not saved yet, within `checkpoint.grace_s`."""
        checkpoints = self.parts.checkpoints
        if not self.config.checkpoint.every:
            return
        try:
            async with asyncio.timeout(self.config.checkpoint.grace_s):
                await self.parts.trainer.abort_step()
                await checkpoints.wait()
                latest = checkpoints.latest()
                if latest is not None and checkpoints.read_state(latest).step == self.version:
                    return
                version = await self.parts.trainer.version()
                if version is None or version > self.version:
                    raise TrainerError("the parameters were on their way to the next policy")
                await self.save()
                await checkpoints.wait()
        except (TimeoutError, RunError) as error:
            self.parts.recorder.warn(f"step {self.version} was not saved: {str(error) or 'checkpoint.grace_s passed'}")

    async def survive(self, error: TrainerError) -> None:
        """After a failed step: abort it, so that it can be tried again. Raises `TrainerLost` if it cannot be."""
        self._failures += 1
        trainer = self.parts.trainer
        try:
            await asyncio.wait_for(trainer.abort_step(), ABORT_SECONDS)
            version = await trainer.version()
        except (TrainerError, TimeoutError):
            raise TrainerLost(str(error)) from error  # what failed first says more
        if isinstance(error, TrainerLost) or version is None or version > self.version:
            raise TrainerLost(str(error)) from error
        if self._failures > self.config.recovery.max_restarts:
            raise error
        self.parts.recorder.warn(f"step {self.version + 1} failed and is tried again: {error}")

    async def _evaluate(self) -> None:
        with self.parts.recorder.timeline.span("driver", "evaluate", step=self.version):
            results, groups = await evaluate(self.parts.rollouter, self.parts.evals, self.config, self.version)
        self.parts.recorder.log_eval(self.version, results, groups, self.parts.rollouter.tokenizer.decode)
        self.accuracy = sum(metrics["accuracy"] for metrics in results.values()) / len(results)

"""What both placements do alike around the trainer: score a group, evaluate, and end a run that learns nothing."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from app.algorithm.advantage import score
from app.errors import RunError
from app.placement.evaluate import evaluate
from app.placement.parts import Parts
from app.types import Group, ScoredGroup, StepReport

EMPTY_STEPS = 3  # in a row; then the run says that nothing can be learnt


class Conductor(ABC):
    """Shared by `Colocate` and `FullyAsync`; `version` is the policy that was pushed last."""

    def __init__(self, parts: Parts, version: int = 0):
        self.parts, self.version = parts, version
        self.config = parts.config
        self.accuracy = 0.0  # of the last evaluation
        self._empty = 0

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
            return await self.parts.trainer.finish_step()
        await self.parts.trainer.abort_step()
        return StepReport(step, 0, {})

    def log(self, step: int, line: Mapping[str, float]) -> None:
        """Record a step's line, with what the rewards had to say; raises `RunError` when too many of them failed."""
        scorer = self.parts.sampler.scorer
        self.parts.recorder.log(step, {**line, **scorer.metrics})
        scorer.check()

    async def _evaluate(self) -> None:
        with self.parts.recorder.timeline.span("driver", "evaluate", step=self.version):
            results, groups = await evaluate(self.parts.sampler, self.parts.evals, self.config, self.version)
        self.parts.recorder.evaluated(self.version, results, groups, self.parts.sampler.tokenizer.decode)
        self.accuracy = sum(metrics["accuracy"] for metrics in results.values()) / len(results)

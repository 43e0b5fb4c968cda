"""`mode=sft`: a supervised run, which imitates the replies of its rows.

    take prompts_per_step rows → render prompt and reply → cross-entropy of the replies' tokens → update → commit

The run is one of `mode=train` with another schedule: devices, trainer, checkpoints, resume, LoRA, trackers and export
are the same. There are no engines, unless `eval.every` is above 0: then they are those of placement=colocate, get the
weights before an evaluation, and hand the devices back after it.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from app.config import RunConfig
from app.mode import ModeResult, train
from app.placement.context import RunContext
from app.placement.controller import PlacementController
from app.start.inputs import RunInputs
from app.types import Group, SyncReport


def run(config: RunConfig, folder: Path, inputs: RunInputs) -> ModeResult:
    """Imitate to the last step; the metric is the last evaluation's accuracy, or 0 without one."""
    return train.run(config, folder, inputs, Supervised)


class Supervised(PlacementController):
    """The schedule of `mode=sft`."""

    def __init__(self, context: RunContext, version: int = 0, *, evaluation_due: bool = False):
        super().__init__(context, version, evaluation_due=evaluation_due)
        self.evaluation_due = self.evaluation_due and self.config.evaluates
        self._prompt_ids: list[str] = []  # of the current step

    async def _run(self) -> None:
        await self.context.supervisor.pause_restarts()
        await self.evaluate_first()

        while not self.finished:
            await self._step(self.version + 1)
            self.evaluation_due = self.evaluation_due and self.config.evaluates
            await self.after_step()

    async def _step(self, step: int) -> None:
        assert self.context.demonstrator is not None
        self.seconds = {}
        prompts = self.context.cursor.take(self.config.algorithm.prompts_per_step)
        self._prompt_ids = [prompt.id for prompt in prompts]
        async with self.phase("train"):
            await self.context.trainer.begin_step(version=step)
            await self.context.trainer.add_demonstrations(self.context.demonstrator.sequences(prompts))
            await self.finish_open_step(step)
        await self.commit()

    async def commit(self, sync: SyncReport | None = None, extra: Mapping[str, float] | None = None) -> None:
        """Record the pending step and mark its rows as consumed."""
        assert self._pending is not None
        seconds = self._step_seconds()  # before the wait for the report
        report = await self._pending.report
        metrics = {"policy_version": float(report.version), **report.metrics}
        metrics |= {f"time/{phase}": value for phase, value in seconds.items()}
        await self.record(metrics, trained=self._prompt_ids)

    async def _sample_evaluation(self) -> tuple[dict[str, dict[str, float]], list[Group]]:
        """Compute the cross-entropy of held-out replies, then sample answers during the engines' turn."""
        trainer, demonstrator = self.context.trainer, self.context.demonstrator
        assert demonstrator is not None
        held_out = {
            name: -float(np.concatenate(await trainer.logprobs(demonstrator.sequences(prompts))).mean(dtype=np.float64))
            for name, prompts in self.context.evals.items()
        }

        await self.context.time_sharing.give_to_engines(lambda: self.sync(self.version))
        results, groups = await super()._sample_evaluation()
        await self.context.time_sharing.give_to_trainer()
        return {name: {**metrics, "cross_entropy": held_out[name]} for name, metrics in results.items()}, groups

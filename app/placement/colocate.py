"""colocate: trainer and engines take turns on the same devices. Every trajectory is on-policy.

    ┌→ train step → offload gradients, optimizer → engines reload weights → push → offload parameters ─┐
    │                                                                        engines reload kv_cache ←─┘
    └─ onload trainer ← engines drain and release everything ← collect prompts_per_step groups ←─┘

The parameters are still on the device when they are pushed, since shards in paused memory cannot be read; the cache
comes back only after they have left.
"""

import time

from app.errors import TrainerError
from app.placement.collect import collect
from app.placement.context import RunContext
from app.placement.controller import PlacementController
from app.placement.step_metrics import step_metrics
from app.placement.time_sharing import OPTIMIZER_STATE, TimeSharing
from app.types import ScoredGroup, StepReport, SyncReport, TrainerMemory


class Colocate(PlacementController):
    def __init__(self, parts: RunContext, version: int = 0):
        super().__init__(parts, version)
        self._turns = TimeSharing(self.config.offload, parts.trainer, parts.pool)
        parts.sync.parameters_at_hand = lambda engines: self._turns.params_onloaded(engines.values())

    async def run(self) -> float:
        """Train to the last step; returns the last evaluation's accuracy."""
        await self._to_engines(self.version)
        await self.evaluate_first()
        while not self.finished:
            await self._step(self.version + 1)
            await self.after_step()
        return self.accuracy

    async def _step(self, step: int) -> None:
        timeline = self.parts.recorder.timeline
        started = time.perf_counter()
        with timeline.span("driver", "generate", step=step):
            groups, tally = await collect(self.parts, self.version)
        self.require_groups(len(groups))
        await self.parts.memory.record_peaks("generate")
        generated = time.perf_counter()
        with timeline.span("driver", "train", step=step):
            await self._to_trainer()
            scored = [self.scored(group) for group in groups]
            report = await self._train(step, scored)
        await self.parts.memory.record_peaks("train")
        trained = time.perf_counter()
        with timeline.span("driver", "sync", step=step):
            sync = await self._to_engines(step)
        await self.parts.memory.record_peaks("sync")
        ended = time.perf_counter()
        seconds = {
            "step": ended - started,
            "generate": generated - started,
            "train": trained - generated,
            "sync": ended - trained,
        }
        tally.failed = self.parts.rollouter.take_lost()
        line = step_metrics(scored, tally, report, sync, seconds, trained_version=self.version)
        await self.commit(step, groups, tally.filtered, line)

    async def _train(self, step: int, scored: list[ScoredGroup]) -> StepReport:
        """The whole step, once more from the same groups if the trainer failed and lives."""
        while True:
            try:
                return await self._attempt(step, scored)
            except TrainerError as error:
                await self.survive(error)

    async def _attempt(self, step: int, scored: list[ScoredGroup]) -> StepReport:
        trainer = self.parts.trainer
        await trainer.begin_step(version=step)
        if scored and self.config.algorithm.needs_old_logprobs:
            await trainer.old_logprobs(scored)
        await trainer.add_groups(scored)
        return await self.finish_step(step, len(scored))

    async def _to_engines(self, version: int) -> SyncReport:
        """Hand the devices to the engines, with the policy of `version` in them."""
        await self._turns.offload_trainer(OPTIMIZER_STATE)
        await self._turns.weights_return()
        report = await self.push(version)
        await self._turns.offload_trainer([TrainerMemory.parameters])
        await self._turns.reload_kv_cache()
        self.parts.sync.engines_turn()
        return report

    async def _to_trainer(self) -> None:
        """Hand the devices to the trainer."""
        await self.parts.sync.trainers_turn()
        await self._turns.offload_engines()
        await self._turns.onload_trainer(TrainerMemory)

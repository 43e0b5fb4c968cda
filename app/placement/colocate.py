"""colocate: trainer and engines take turns on the same devices. Every trajectory is on-policy.

    ┌──────────────────────────────────────────────────────────────────────────────────────────────┐
    │ train step → offload gradients, optimizer → engines reload weights → push → offload parameters │
    │     ↑                                                            → engines reload kv_cache     │
    │ onload trainer ← engines drain and release everything ← collect prompts_per_step groups ←──────┘

The parameters are still on the device when they are pushed, since shards in paused memory cannot be read; the cache
comes back only after they have left.
"""

import time

from app.algorithm.advantage import score
from app.algorithm.metrics import advantage_metrics, group_metrics, staleness_metrics
from app.placement.collect import Collected, collect
from app.placement.evaluate import evaluate
from app.placement.parts import Parts
from app.types import EnginePart, InFlight, StepReport, SyncReport, TrainerPart


class Colocate:
    """One run; `version` is the policy that was pushed last."""

    def __init__(self, parts: Parts, version: int = 0):
        self.parts, self.version = parts, version
        self.config = parts.config

    async def run(self) -> float:
        """Train to the last step; returns the last evaluation's accuracy."""
        await self._to_engines(self.version)
        accuracy = 0.0
        if self.config.eval.before_train:
            accuracy = await self._evaluate()
        while self.version < self.config.steps:
            await self._step(self.version + 1)
            if self._due(self.config.eval.every) or self.version == self.config.steps:
                accuracy = await self._evaluate()
        return accuracy

    async def _step(self, step: int) -> None:
        recorder, timeline = self.parts.recorder, self.parts.recorder.timeline
        started = time.perf_counter()
        with timeline.span("driver", "generate", step=step):
            collected = await collect(self.parts, self.version)
        generated = time.perf_counter()
        with timeline.span("driver", "train", step=step):
            await self._to_trainer()
            report, spread = await self._train(step, collected)
        trained = time.perf_counter()
        with timeline.span("driver", "sync", step=step):
            sync = await self._to_engines(step)
        ended = time.perf_counter()
        seconds = {"generate": generated - started, "train": trained - generated, "sync": ended - trained}
        stale = staleness_metrics(collected.groups, self.version) if collected.groups else {}
        recorder.samples(step, collected.groups, self.parts.sampler.tokenizer.decode)
        self.version = step
        recorder.log(step, {**stale, **spread, **self._metrics(collected, report, sync, seconds)})

    async def _train(self, step: int, collected: Collected) -> tuple[StepReport, dict[str, float]]:
        trainer, algorithm = self.parts.trainer, self.config.algorithm
        limit = self.config.rollout.max_completion_tokens
        scored = [score(group, algorithm, max_completion_tokens=limit) for group in collected.groups]
        await trainer.begin_step(version=step)
        if algorithm.needs_old_logprobs:
            await trainer.old_logprobs(scored)
        await trainer.train_groups(scored)
        return await trainer.finish_step(), advantage_metrics(scored) if scored else {}

    async def _to_engines(self, version: int) -> SyncReport:
        """Hand the devices to the engines, with the policy of `version` in them."""
        trainer, pool = self.parts.trainer, self.parts.pool
        if self.config.offload.trainer:
            await trainer.offload(TrainerPart.gradients)
            await trainer.offload(TrainerPart.optimizer)
        if self.config.offload.engine:
            await pool.broadcast("reload", EnginePart.weights)
        report = await self.parts.sync.push(version)
        if self.config.offload.trainer:
            await trainer.offload(TrainerPart.parameters)
        if self.config.offload.engine:
            await pool.broadcast("reload", EnginePart.kv_cache)
            await pool.broadcast("reload", EnginePart.graphs)
        return report

    async def _to_trainer(self) -> None:
        """Hand the devices to the trainer."""
        trainer, pool = self.parts.trainer, self.parts.pool
        if self.config.offload.engine:
            await pool.broadcast("pause", InFlight.drain)
            for part in (EnginePart.graphs, EnginePart.kv_cache, EnginePart.weights):
                await pool.broadcast("release", part)
        if self.config.offload.trainer:
            for member in (TrainerPart.parameters, TrainerPart.optimizer, TrainerPart.gradients):
                await trainer.onload(member)

    async def _evaluate(self) -> float:
        with self.parts.recorder.timeline.span("driver", "evaluate", step=self.version):
            results, _ = await evaluate(self.parts.sampler, self.parts.evals, self.config, self.version)
        self.parts.recorder.evaluated(self.version, results)
        return sum(metrics["accuracy"] for metrics in results.values()) / len(results)

    def _due(self, every: int) -> bool:
        return every > 0 and self.version % every == 0

    def _metrics(
        self, collected: Collected, report: StepReport, sync: SyncReport, seconds: dict[str, float]
    ) -> dict[str, float]:
        """The step's line, but for staleness and advantages."""
        groups = group_metrics(collected.sampled)
        total = sum(seconds.values())
        return {
            "policy_version": float(report.version),
            **groups,
            "rollout/filtered_groups": float(collected.filtered),
            "rollout/refill_rounds": float(collected.rounds),
            **report.metrics,
            **sync.metrics,
            "time/step": total,
            **{f"time/{phase}": value for phase, value in seconds.items()},
            "throughput/completion_tokens_per_second": groups["tokens/completion"] / total,
        }

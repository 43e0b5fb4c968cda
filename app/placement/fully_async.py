"""fully_async: generation never waits for training, training never waits for the slowest completion.

    producer   prompts ─ admission ─→ engines ─→ rewards ─→ buffer ((max_staleness + 1) · prompts_per_step groups)
                 ↑ gate                                        │ staleness is checked here, when a group is taken
    consumer     └── open ← push ← finish step ← feed groups ←─┘ as they arrive (stream) or when all are there

A group is never trained on when its oldest token is more than `max_staleness` pushes old. Completions in flight at a
push finish first (drain), or continue with a recomputed (retract) or the old cache (in_place).
"""

import asyncio
import time

from app.errors import TrainerError
from app.placement.buffer import GroupBuffer
from app.placement.context import RunContext
from app.placement.controller import PlacementController
from app.placement.producer import Producer
from app.placement.staleness import StalenessManager
from app.placement.step_metrics import RolloutCounts, step_metrics
from app.placement.watchdog import watch
from app.types import Group, ScoredGroup, StepReport
from app.utils.tasks import root_cause


class FullyAsync(PlacementController):
    def __init__(self, parts: RunContext, version: int = 0):
        super().__init__(parts, version)
        algorithm, placement = self.config.algorithm, self.config.placement
        self.wanted = algorithm.prompts_per_step
        self.admission = StalenessManager.at(
            version,
            prompts_per_step=self.wanted,
            max_staleness=placement.max_staleness,
            max_in_flight=self.config.rollout.max_inflight_groups,
            last_step=self.config.steps,
        )
        self.buffer = GroupBuffer((placement.max_staleness + 1) * self.wanted)
        self.tally = RolloutCounts()
        self.producer = Producer(parts, self.admission, self.buffer, self.tally)
        self.steps_finished = 0
        self._doing = "starting"
        self._waited = 0.0  # seconds of this step in which the trainer had nothing to do

    async def run(self) -> float:
        """Train to the last step; returns the last evaluation's accuracy."""
        await self.push(self.version)
        await self.evaluate_first()
        self.admission.dispatch_open = True
        try:
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(self.producer.run(), name="producer"),
                    tasks.create_task(watch(self), name="watchdog"),
                ]
                await tasks.create_task(self._consume(), name="consumer")
                for other in others:
                    other.cancel()
        except BaseExceptionGroup as failures:
            raise root_cause(failures) from None
        return self.accuracy

    async def _consume(self) -> None:
        while not self.finished:
            try:
                await self._step(self.version + 1)
            except TrainerError as error:
                await self.survive(error)
                continue
            self._doing = "evaluating"
            await self.after_step()
            self.admission.dispatch_open = True
            self.producer.look_again()

    async def _step(self, step: int) -> None:
        recorder, pool = self.parts.recorder, self.parts.pool
        started, busy = time.perf_counter(), pool.busy_seconds()
        self._waited = 0.0
        with recorder.timeline.span("driver", "train", step=step):
            scored, report = await self._train(step)
        await self.parts.memory.record_peaks("train")
        trained = time.perf_counter()
        with recorder.timeline.span("driver", "sync", step=step):
            self._doing = "pushing"
            self.admission.dispatch_open = False
            await self.producer.abort_stale(step)
            sync = await self.push(step)
        await self.parts.memory.record_peaks("sync")
        ended = time.perf_counter()
        self.admission.push(step, missing=self.wanted - len(scored))
        self.producer.forget(each.group for each in scored)
        self.steps_finished += 1
        total = ended - started
        seconds = {
            "step": total,
            "generate": pool.busy_seconds() - busy,
            "wait": self._waited,
            "train": trained - started - self._waited,
            "sync": ended - trained,
        }
        idle = {
            "idle/trainer": (self._waited + seconds["sync"]) / total,
            "idle/rollout": 1 - seconds["generate"] / total,
        }
        tally = self.tally.take()
        tally.failed = self.parts.rollouter.take_lost()
        line = step_metrics(scored, tally, report, sync, seconds, trained_version=self.version)
        await self.commit(step, [each.group for each in scored], tally.filtered, {**line, **idle})

    async def _train(self, step: int) -> tuple[list[ScoredGroup], StepReport]:
        """One step of the split trainer. When it fails, what it was fed goes back to the head of the buffer."""
        trainer, fed = self.parts.trainer, list[ScoredGroup]()
        await trainer.begin_step(version=step)
        try:
            while len(fed) < self.wanted and not self._refilled_enough():
                fresh = [self.scored(group) for group in await self._take(self.wanted - len(fed))]
                fed += fresh
                if self.config.stream and fresh:
                    self._doing = "training"
                    await trainer.add_groups(fresh)
            self.require_groups(len(fed))
            self._doing = "training"
            if not self.config.stream:
                fed = self.producer.in_order(fed)
                if fed and self.config.algorithm.needs_old_logprobs:
                    self._doing = "computing old log-probabilities"
                    await trainer.old_logprobs(fed)
                    self._doing = "training"
                await trainer.add_groups(fed)
            self._doing = "finishing the step"
            with self.parts.recorder.timeline.span("trainer", "finish", step=step):
                return fed, await self.finish_step(step, len(fed))
        except TrainerError:
            self.buffer.put_back([each.group for each in fed])
            raise

    async def _take(self, most: int) -> list[Group]:
        """Groups fresh enough to be trained on now; staler ones are dropped, counted, their prompts sampled anew."""
        self._doing = "waiting for groups"
        started = time.perf_counter()
        with self.parts.recorder.timeline.span("trainer", "wait", step=self.version + 1):
            taken, stale = await self.buffer.take(
                most, is_fresh=lambda group: self.admission.is_fresh(group.oldest_version)
            )
        self._waited += time.perf_counter() - started
        if stale:
            self.tally.dropped += len(stale)
            self.admission.give_back(len(stale))
            self.producer.forget(stale)
            self.parts.cursor.give_back([group.prompt.id for group in stale])
            self.producer.look_again()
        return taken

    def _refilled_enough(self) -> bool:
        """Whether dynamic sampling filtered so much that the step goes on with what is there, which it takes first."""
        limit = (1 + self.config.algorithm.max_refill_rounds) * self.wanted  # the first round is no refill
        return not len(self.buffer) and len(self.tally.filtered) >= limit

    @property
    def progress(self) -> tuple[object, ...]:
        """Changes whenever a group is finished or a phase of a step."""
        return self.parts.rollouter.finished, self.steps_finished, self._doing

    def situation(self) -> str:
        """What everyone waits for, in one line."""
        admission, waiting = self.admission, ", ".join(list(self.producer.running)[:5])
        return (
            f"step {self.version + 1}, {self._doing}: {len(self.buffer)} groups in the buffer, "
            f"{admission.in_flight} in flight ({waiting}), room for {admission.capacity} more, "
            f"gate {'open' if admission.dispatch_open else 'shut'}"
        )

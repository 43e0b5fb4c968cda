"""fully_async: generation never waits for training, and training never waits for the slowest completion.

    producer   prompts ─ admission ─→ engines ─→ rewards ─→ buffer ((max_staleness + 1) · prompts_per_step groups)
                 ↑                                              │ staleness is checked when a group is taken
    consumer     └─ dispatch ← sync ← finish step ← add groups ←┘ as they arrive (stream), or all at once

Two loops run as tasks of one group; the first failure ends both.

| loop     | consumes         | produces        | waits for             | unblocked by                        |
|----------|------------------|-----------------|-----------------------|-------------------------------------|
| producer | prompts (cursor) | groups (buffer) | admission capacity    | a group that ends untrained; a sync |
| consumer | groups (buffer)  | policy versions | a group in the buffer | a group put or rejected (`wake`)    |

As in every placement, a watchdog around the run ends it when neither makes progress (`app/placement/watchdog.py`).

No deadlock: while the consumer waits, it lacks groups of its step. Admission always allows the groups of the next step,
so either some are in flight, and each ends (its engine finishes it or is replaced), or there is capacity for them.

An evaluation of version v begins right after its sync, beside step v + 1, and step v + 1 waits for it before its first
update (`evaluation_wait`):

    engines   │ evaluation of v, and groups ─────────────────────────────┐ groups ──────────┐
    trainer   │ step v + 1: collect, forward, backward │ evaluation_wait │ save v │ update  │ sync v + 1

The update, not only the sync, waits: the trainer then still holds version v for an engine that has to be restarted, for
the checkpoint of the best accuracy, and for a run that its evaluation stops.

Invariants:
    - A group is never trained on when its oldest token is more than `max_staleness` syncs old.
    - Completions in flight at a sync finish first (drain), or continue with a recomputed (retract) or the old KV cache
      (in_place).
    - One version samples every completion of an evaluation: no newer one exists before the evaluation ends.
"""

from collections.abc import Mapping

from app.placement.context import RunContext
from app.placement.controller import PlacementController
from app.placement.producer import Producer
from app.types import ScoredGroup
from app.utils.tasks import task_group


class FullyAsync(PlacementController):
    """The schedule of `placement=fully_async`."""

    def __init__(self, context: RunContext, version: int = 0, *, evaluation_due: bool = False):
        super().__init__(context, version, evaluation_due=evaluation_due)
        self.producer = Producer(context, version)
        self._busy_before = 0.0  # seconds in which engines had requests, before the current step

    async def _run(self) -> None:
        await self.sync(self.version)
        await self.evaluate_first()
        await self.producer.run_beside(self._consume())

    async def _consume(self) -> None:
        while not self.finished:
            await self._step(self.version + 1)
            if self.finished or not self.evaluation_due:  # else the next step evaluates beside its work, then saves
                await self.after_step()
            self.producer.resume_dispatch()

    async def _step(self, step: int) -> None:
        self.seconds = {}
        self._busy_before = self.context.pool.busy_seconds()

        self.context.probe.start(self.version, self.context.pool.alive)
        async with self.phase("train"):
            scored = await (self._fill_beside_evaluation(step) if self.evaluation_due else self._fill(step))
            if self.finished:  # by the evaluation of the version before
                await self.context.trainer.abort_step()
                return

            async with self.phase("finish", track="trainer", record_memory=False):
                await self.finish_step(step, scored, self.producer.drain_counts())

        async with self.phase("sync"):
            self.producer.pause_dispatch()
            await self.producer.abort_stale(step)
            sync = await self.sync(step)

        self.producer.on_weights_synced(step, [each.group for each in scored])
        await self.commit(sync)

    async def _fill_beside_evaluation(self, step: int) -> list[ScoredGroup]:
        """Evaluate the current version while the next step is filled; then save what is due of that version."""
        async with task_group() as tasks:
            evaluation = tasks.create_task(self._evaluate_on_own_track(), name="evaluation")
            scored = await self._fill(step)
            busy = self.context.pool.busy_seconds()
            async with self.phase("evaluation_wait", track="trainer", record_memory=False):
                await evaluation

        async with self.phase("save", record_memory=False):
            await self.after_step()
        self._busy_before += self.context.pool.busy_seconds() - busy  # no part of the step, as in `_step_seconds`
        return scored

    async def _evaluate_on_own_track(self) -> None:
        # No `phase`: those of the step go on.
        with self.context.recorder.timeline.span("evaluation", "evaluate", step=self.version):
            await self._run_evaluation()

    async def _fill(self, step: int) -> list[ScoredGroup]:
        """Open a step, take its groups and add them; if streaming, as they arrive."""
        await self.context.trainer.begin_step(version=step)
        scored: list[ScoredGroup] = []
        wanted = self.config.algorithm.prompts_per_step
        while len(scored) < wanted and not self.producer.refill_exhausted():
            async with self.phase("wait", track="trainer", record_memory=False):
                groups = await self.producer.take(wanted - len(scored))
            fresh = [self.score(group) for group in groups]
            scored += fresh
            if self.config.stream and fresh:
                await self.context.trainer.add_groups(fresh)

        self.require_groups(len(scored), self.producer.counts)
        if not self.config.stream:
            # Arrival order would put the short completions into the same update.
            scored.sort(key=lambda each: self.producer.dispatch_number(each.group))
            if scored and self.config.algorithm.needs_old_logprobs:
                async with self.phase("old_logprobs", track="trainer", record_memory=False):
                    await self.context.trainer.old_logprobs(scored)
            await self.context.trainer.add_groups(scored)
        return scored

    def _step_seconds(self) -> dict[str, float]:
        """Return the seconds of the step, and those in which it waited for an evaluation, which are no part of it.

        The train phase contains all but the sync. `wait` is the time without groups to train on.
        """
        names = ("train", "sync", "wait", "evaluation_wait", "save")
        train, sync, wait, evaluation_wait, save = (self.seconds.get(phase, 0.0) for phase in names)
        train -= evaluation_wait + save
        generate = self.context.pool.busy_seconds() - self._busy_before
        seconds = {"step": train + sync, "generate": generate, "wait": wait, "train": train - wait, "sync": sync}
        return {**seconds, "evaluation_wait": evaluation_wait}

    def _idle_shares(self, seconds: Mapping[str, float]) -> Mapping[str, float]:
        return {
            "idle/trainer": (seconds["wait"] + seconds["sync"]) / seconds["step"],
            "idle/rollout": 1 - seconds["generate"] / seconds["step"],
        }

    def describe(self) -> str:
        evaluating = f"; evaluating step {self.version}" if self.evaluation_due else ""
        return f"{super().describe()}; {self.producer.describe()}{evaluating}"

"""colocate: trainer and engines time-share the same devices.

    ┌→ train → offload gradients, optimizer → engines reload weights → sync → offload parameters ─┐
    │                                                                 engines reload KV cache ←───┘
    └─ onload trainer ← engines pause and release everything ← generate prompts_per_step groups ←─┘

One loop: a step generates, trains and syncs, in that order; nothing overlaps.

With `max_staleness=0` every trajectory is on-policy: the engines finish all groups that they began. Otherwise rollouts
are partial: the producer of fully_async begins up to `max_staleness` steps more groups than a step needs. Once the step
has its groups, the others are retracted: they free their KV cache, keep their tokens, and continue after the sync.
"""

from app.algorithm.filter import RolloutCounts
from app.placement.context import RunContext
from app.placement.controller import PlacementController
from app.placement.producer import Producer
from app.rollout.requests import sampling_of
from app.types import Group


class Colocate(PlacementController):
    """The schedule of `placement=colocate`."""

    def __init__(self, context: RunContext, version: int = 0, *, evaluation_due: bool = False):
        super().__init__(context, version, evaluation_due=evaluation_due)
        # None: on-policy
        self.producer = Producer(context, version) if self.config.placement.max_staleness else None

    async def _run(self) -> None:
        # An engine that is lost before the first sync is restarted by it: the parameters are on the device.
        await self.context.supervisor.pause_restarts()
        await self.context.time_sharing.give_to_engines(lambda: self.sync(self.version))
        await self.evaluate_first()
        if self.producer is None:
            await self._make_steps()
        else:
            await self.producer.run_beside(self._make_steps())

    async def _make_steps(self) -> None:
        while not self.finished:
            await self._step(self.version + 1)
            await self.after_step()
            if self.producer is not None:
                self.producer.resume_dispatch()

    async def _step(self, step: int) -> None:
        self.seconds = {}
        async with self.phase("generate"):
            self.context.probe.start(self.version, self.context.pool.alive)
            groups, counts = await (self._generate() if self.producer is None else self._take(self.producer, step))
        self.require_groups(len(groups), counts)

        async with self.phase("train"):
            trainer = self.context.trainer
            await self.context.time_sharing.give_to_trainer()
            scored = [self.score(group) for group in groups]
            await trainer.begin_step(version=step)
            if scored and self.config.algorithm.needs_old_logprobs:
                await trainer.old_logprobs(scored)
            await trainer.add_groups(scored)
            await self.finish_step(step, scored, counts)

        async with self.phase("sync"):
            sync = await self.context.time_sharing.give_to_engines(lambda: self.sync(step))

        if self.producer is not None:
            self.producer.on_weights_synced(step, groups)
        await self.commit(sync)

    async def _take(self, producer: Producer, step: int) -> tuple[list[Group], RolloutCounts]:
        """Return the first `prompts_per_step` groups that are done, in the order of their dispatch."""
        groups: list[Group] = []
        while len(groups) < producer.wanted and not producer.refill_exhausted():
            groups += await producer.take(producer.wanted - len(groups))

        producer.pause_dispatch()
        await self.context.probe.sampled()  # a paused engine would not answer
        await producer.abort_stale(step)
        return sorted(groups, key=producer.dispatch_number), producer.drain_counts()

    async def _generate(self) -> tuple[list[Group], RolloutCounts]:
        """Sample `prompts_per_step` groups, in the order of their prompts.

        Groups that are not kept are replaced by others, for at most `max_refill_rounds` rounds.
        """
        algorithm, context = self.config.algorithm, self.context
        groups: list[Group] = []
        counts = RolloutCounts()
        for _ in range(1 + algorithm.max_refill_rounds):
            sampled = await context.rollouter.groups(
                context.cursor.take(algorithm.prompts_per_step - len(groups)),
                size=algorithm.group_size,
                sampling=sampling_of(self.config.rollout),
                version=self.version,
                limit=context.concurrency.groups,
            )
            groups += [group for group in sampled if counts.keep(group, algorithm)]
            if len(groups) == algorithm.prompts_per_step:
                break

        counts.failed = context.rollouter.pop_lost()
        return groups, counts

    def describe(self) -> str:
        return super().describe() + (f"; {self.producer.describe()}" if self.producer is not None else "")

"""colocate: trainer and engines time-share the same devices. Every trajectory is on-policy.

    ┌→ train → offload gradients, optimizer → engines reload weights → sync → offload parameters ─┐
    │                                                                 engines reload KV cache ←───┘
    └─ onload trainer ← engines drain and release everything ← generate prompts_per_step groups ←─┘

One loop: a step generates, trains and syncs, in that order; nothing overlaps.
"""

from app.algorithm.filter import RolloutCounts
from app.placement.controller import PlacementController
from app.types import Group, ScoredGroup


class Colocate(PlacementController):
    """The schedule of `placement=colocate`."""

    async def _run(self) -> None:
        # An engine that is lost before the first sync is restarted by it: the parameters are on the device.
        await self.context.supervisor.pause_restarts()
        await self.context.time_sharing.give_to_engines(lambda: self.sync(self.version))
        await self.evaluate_first()

        while not self.finished:
            await self._step(self.version + 1)
            await self.after_step()

    async def _step(self, step: int) -> None:
        self.seconds = {}
        async with self.phase("generate"):
            self.context.probe.start(self.version, self.context.pool.alive)
            groups, counts = await self._generate()
        self.require_groups(len(groups), counts)

        async with self.phase("train"):
            await self.context.time_sharing.give_to_trainer()
            await self._train(step, [self.score(group) for group in groups], counts)

        async with self.phase("sync"):
            sync = await self.context.time_sharing.give_to_engines(lambda: self.sync(step))

        await self.commit(sync)

    async def _generate(self) -> tuple[list[Group], RolloutCounts]:
        """Sample `prompts_per_step` groups, in the order of their prompts.

        Groups that are not kept are replaced by others, for at most `max_refill_rounds` rounds.
        """
        algorithm = self.config.algorithm
        groups: list[Group] = []
        counts = RolloutCounts()
        for _ in range(1 + algorithm.max_refill_rounds):
            sampled = await self._sample(algorithm.prompts_per_step - len(groups))
            groups += [group for group in sampled if counts.keep(group, algorithm)]
            if len(groups) == algorithm.prompts_per_step:
                break

        counts.failed = self.context.rollouter.pop_lost()
        return groups, counts

    async def _sample(self, count: int) -> list[Group]:
        """Sample the groups of the next `count` prompts, in the order of the prompts."""
        context = self.context
        return await context.rollouter.groups(
            context.cursor.take(count),
            size=self.config.algorithm.group_size,
            sampling=context.sampling,
            version=self.version,
            limit=self.config.rollout.max_inflight_groups,
        )

    async def _train(self, step: int, scored: list[ScoredGroup], counts: RolloutCounts) -> None:
        trainer = self.context.trainer
        await trainer.begin_step(version=step)
        if scored and self.config.algorithm.needs_old_logprobs:
            await trainer.old_logprobs(scored)
        await trainer.add_groups(scored)
        await self.finish_step(step, scored, counts)

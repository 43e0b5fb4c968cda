"""Collect the groups of one step while nothing is being trained; with dynamic sampling, refill what teaches nothing."""

from dataclasses import dataclass

from app.algorithm.advantage import has_spread
from app.placement.parts import Parts
from app.types import Group


@dataclass(frozen=True, slots=True)
class Collected:
    """A step's groups, in the order of their prompts, and what was left out on the way."""

    groups: list[Group]  # to train on
    sampled: list[Group]  # all of them, filtered ones included
    rounds: int  # of refill

    @property
    def filtered(self) -> int:
        return len(self.sampled) - len(self.groups)


async def collect(parts: Parts, version: int) -> Collected:
    """`prompts_per_step` groups by policy `version`. After `max_refill_rounds` it goes on with what is there."""
    algorithm, rollout = parts.config.algorithm, parts.config.rollout
    wanted = algorithm.prompts_per_step
    kept: list[Group] = []
    sampled: list[Group] = []
    rounds = 0
    while len(kept) < wanted and rounds <= algorithm.max_refill_rounds:
        prompts = parts.cursor.take(wanted - len(kept))
        order = {prompt.id: place for place, prompt in enumerate(prompts)}
        stream = parts.sampler.groups(
            prompts,
            size=algorithm.group_size,
            sampling=parts.sampling,
            version=version,
            limit=rollout.max_inflight_groups,
        )
        fresh = sorted([group async for group in stream], key=lambda group: order[group.prompt.id])
        sampled += fresh
        kept += [group for group in fresh if not algorithm.dynamic_sampling or has_spread(group)]
        rounds += 1
    return Collected(kept, sampled, rounds - 1)

"""Collect the groups of one step while nothing is being trained; with dynamic sampling, refill what teaches nothing."""

from app.algorithm.advantage import has_reward_variance
from app.placement.context import RunContext
from app.placement.step_metrics import RolloutCounts
from app.types import Group


async def collect(parts: RunContext, version: int) -> tuple[list[Group], RolloutCounts]:
    """`prompts_per_step` groups by policy `version`, in the order of their prompts, and what happened to the others.

    With dynamic sampling (DAPO, section 3.2) groups whose raw rewards are all equal are left out and others sampled in
    their place; after `max_refill_rounds` of that it goes on with what is there.
    """
    algorithm, limit = parts.config.algorithm, parts.config.rollout.max_inflight_groups
    kept: list[Group] = []
    tally = RolloutCounts()
    for _ in range(1 + algorithm.max_refill_rounds):
        prompts = parts.cursor.take(algorithm.prompts_per_step - len(kept))
        place = {prompt.id: index for index, prompt in enumerate(prompts)}
        stream = parts.rollouter.groups(
            prompts, size=algorithm.group_size, sampling=parts.sampling, version=version, limit=limit
        )
        fresh = sorted([group async for group in stream], key=lambda group: place[group.prompt.id])
        useful = [not algorithm.dynamic_sampling or has_reward_variance(group) for group in fresh]
        kept += [group for group, keep in zip(fresh, useful, strict=True) if keep]
        tally.filtered += [group for group, keep in zip(fresh, useful, strict=True) if not keep]
        if len(kept) == algorithm.prompts_per_step:
            break
    return kept, tally

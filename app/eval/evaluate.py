"""Evaluation on the held-out sets, with one policy version for all of it."""

from collections.abc import Mapping, Sequence

import numpy as np

from app.algorithm.metrics import correct, pass_at_k
from app.config import RunConfig
from app.rollout.rollouter import Rollouter
from app.types import Group, Prompt, Sampling


async def evaluate(
    rollouter: Rollouter, sets: Mapping[str, Sequence[Prompt]], config: RunConfig, version: int
) -> tuple[dict[str, dict[str, float]], list[Group]]:
    """Metrics of each set, and the groups of all. Nothing else may be generating: one version samples all of it."""
    settings = config.eval
    sampling = Sampling(settings.temperature, settings.top_p, config.rollout.max_completion_tokens)
    limit = config.rollout.max_inflight_groups * config.algorithm.group_size // settings.samples
    results: dict[str, dict[str, float]] = {}
    everything: list[Group] = []
    for name, prompts in sets.items():
        stream = rollouter.groups(
            prompts, size=settings.samples, sampling=sampling, version=version, limit=max(1, limit)
        )
        groups = [group async for group in stream]
        results[name] = measure(groups, settings.samples)
        everything += groups
    return results, everything


def measure(groups: Sequence[Group], samples: int) -> dict[str, float]:
    """Accuracy (over completions), mean reward and length, truncated fraction; pass@k of several samples."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    right = [sum(correct(trajectory) for trajectory in group.trajectories) for group in groups]
    powers = [2**power for power in range(1, samples.bit_length()) if 2**power <= samples]
    return {
        "accuracy": float(np.mean([correct(trajectory) for trajectory in trajectories])),
        "reward": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "length_mean": float(np.mean([len(t.completion.token_ids) for t in trajectories])),
        "truncated_fraction": float(np.mean([t.completion.truncated for t in trajectories])),
        **{f"pass@{k}": float(np.mean([pass_at_k(samples, c, k) for c in right])) for k in powers},
    }

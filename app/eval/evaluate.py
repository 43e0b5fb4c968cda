"""Evaluation on the held-out sets, with one policy version throughout."""

from collections.abc import Mapping, Sequence

from app.algorithm.metrics import group_metrics
from app.config import RunConfig
from app.rollout.rollouter import Rollouter
from app.types import Group, Prompt, Sampling

REPORTED = {  # metric of an evaluation → metric of `group_metrics`
    "accuracy": "reward/accuracy",
    "reward": "reward/mean",
    "length_mean": "completion/length_mean",
    "truncated_fraction": "completion/truncated_fraction",
}


async def evaluate(
    rollouter: Rollouter, sets: Mapping[str, Sequence[Prompt]], config: RunConfig, version: int
) -> tuple[dict[str, dict[str, float]], list[Group]]:
    """Return the metrics of each set and the groups of all sets.

    Nothing else may be generating, so that a single policy version samples every completion.
    """
    settings = config.eval
    sampling = Sampling(settings.temperature, settings.top_p, config.rollout.max_completion_tokens)
    # as many completions in flight as in training
    limit = max(1, config.rollout.max_inflight_groups * config.algorithm.group_size // settings.samples)

    metrics: dict[str, dict[str, float]] = {}
    all_groups: list[Group] = []
    for name, prompts in sets.items():
        stream = rollouter.groups(prompts, size=settings.samples, sampling=sampling, version=version, limit=limit)
        groups = [group async for group in stream]
        metrics[name] = measure(groups)
        all_groups += groups
    return metrics, all_groups


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

"""Training metrics, each with its own denominator, and driver-side metrics of groups.

`TABLE` defines the divisor of every summed training metric. The loss (`loss.py`) returns raw sums per microbatch, the
trainer merges them over microbatches and ranks, and `finalize` divides once per update by global counts. A shared
divisor or a mean of per-rank means would bias the metrics. Group metrics are computed on the driver from raw rewards.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np

from app.types import Group, ScoredGroup, Trajectory

# Built-in reward components that are 1 if and only if the answer is correct.
CORRECTNESS_COMPONENTS = ("exact", "math", "code")


class Denominator(Enum):
    """Divisor of a raw value at the end of an update."""

    tokens = "tokens"
    compared = "compared"  # tokens whose π_old of the trainer is known: `mismatch/tokens`
    same_version = "same_version"  # of these, sampled by the policy of π_old: `mismatch/same_version_tokens`
    trajectories = "trajectories"
    loss = "loss"  # `loss.common_denominator`
    demonstrated = "demonstrated"  # tokens of demonstrations
    max = "max"  # merged by max, never divided
    min = "min"  # merged by min, never divided
    intermediate = "intermediate"  # input of another metric, not reported


TABLE: Mapping[str, Denominator] = {
    "loss/total": Denominator.loss,
    # Terms of the total, coefficients included.
    "loss/policy": Denominator.loss,
    "loss/kl": Denominator.loss,
    "loss/entropy": Denominator.loss,
    "loss/ce": Denominator.demonstrated,  # nats per token, without its coefficient
    "entropy": Denominator.tokens,
    "ratio/mean": Denominator.tokens,
    "ratio/sequence_mean": Denominator.trajectories,  # GSPO's: geometric mean of a sequence; by their tokens
    "ratio/max": Denominator.max,
    "ratio/min": Denominator.min,
    "clip/low_fraction": Denominator.tokens,
    "clip/high_fraction": Denominator.tokens,
    "clip/dual_fraction": Denominator.tokens,
    "kl/old": Denominator.tokens,  # k3 of KL(π_old ‖ π)
    "kl/reference": Denominator.tokens,  # k3 of KL(π ‖ π_ref)
    "teacher/kl": Denominator.tokens,  # log π − log π_teacher, the k1 estimate of KL(π ‖ π_teacher)
    "teacher/clipped_fraction": Denominator.tokens,
    "mismatch/kl": Denominator.compared,  # k3 of KL(π_rollout ‖ π_old of the trainer)
    "mismatch/kl_same_version": Denominator.same_version,  # the same of on-policy tokens; absent without any
    "mismatch/same_version_tokens": Denominator.intermediate,
    "mismatch/abs_difference": Denominator.compared,  # of log-probabilities
    "mismatch/max_ratio": Denominator.max,
    "mismatch/tokens": Denominator.intermediate,
    "mismatch/weight": Denominator.intermediate,
    "mismatch/weight_square": Denominator.intermediate,
    "mismatch/masked_fraction": Denominator.compared,  # tokens zeroed by the correction
}

EXTREMES = {Denominator.max: max, Denominator.min: min}


def merge(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Merge the raw sums of two microbatches or ranks. The empty mapping is the neutral element."""
    merged = dict(one)
    for name, value in other.items():
        combine = EXTREMES.get(TABLE[name], operator.add)
        merged[name] = combine(merged[name], value) if name in merged else value
    return merged


def finalize(
    sums: Mapping[str, float], *, tokens: float, sequences: float, loss: float, demonstrated: float = 0
) -> dict[str, float]:
    """Compute the metrics of an update from sums and counts over all microbatches and ranks.

    `tokens` and `sequences` are those of the unmasked batch; without tokens, their metrics are 0. `loss` is the
    update's `loss.common_denominator`, and `demonstrated` counts the tokens of demonstrations.
    """
    unreported = {Denominator.intermediate}
    if not sums.get("mismatch/same_version_tokens"):
        unreported.add(Denominator.same_version)
    reported = {name: value for name, value in sums.items() if TABLE[name] not in unreported}
    counts = {Denominator.loss: loss, Denominator.demonstrated: demonstrated}
    if tokens:
        counts[Denominator.tokens] = tokens
        counts[Denominator.trajectories] = sequences
        counts[Denominator.compared] = sums.get("mismatch/tokens", 0.0)
        counts[Denominator.same_version] = sums.get("mismatch/same_version_tokens", 0.0)
        counts[Denominator.max] = counts[Denominator.min] = 1.0
    elif not demonstrated:
        counts = {}
    metrics = {
        name: value / counts[TABLE[name]] if counts.get(TABLE[name]) else 0.0 for name, value in reported.items()
    }

    # (Σw)² / (N · Σw²): 1 if all weights are equal.
    if squares := counts.get(Denominator.compared, 0.0) * sums.get("mismatch/weight_square", 0.0):
        metrics["mismatch/effective_sample_size"] = sums["mismatch/weight"] ** 2 / squares
    return metrics


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Measure raw rewards, correctness and lengths of a step's groups (at least one)."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    by_group = [group.rewards for group in groups]
    rewards = np.concatenate(by_group)
    counts = [(len(group.trajectories), sum(map(correct, group.trajectories))) for group in groups]
    lengths = np.array([trajectory.sampled_tokens for trajectory in trajectories], dtype=np.float64)
    prompt_tokens = sum(group.trajectories[0].prompt_tokens for group in groups)
    smallest = min(size for size, _ in counts)
    ks = [2**power for power in range(smallest.bit_length())]  # up to the smallest group
    # of each group, whether its trajectories are copies of one
    sampled = [{tuple(each.token_ids.tobytes() for each in t.sequences) for t in g.trajectories} for g in groups]
    identical = [len(each) == 1 < len(group.trajectories) for each, group in zip(sampled, groups, strict=True)]

    return {
        # First, so that a component called "accuracy" or "mean" does not replace the metric of that name.
        **_component_metrics(trajectories),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/accuracy": sum(right for _, right in counts) / len(trajectories),
        **{f"reward/pass@{k}": float(np.mean([pass_at_k(n, c, k) for n, c in counts])) for k in ks},
        "reward/zero_std_fraction": float(np.mean([each.min() == each.max() for each in by_group])),
        "reward/all_correct_fraction": float(np.mean([right == size for size, right in counts])),
        "reward/all_wrong_fraction": float(np.mean([right == 0 for _, right in counts])),
        "completion/identical_fraction": float(np.mean(identical)),
        "completion/length_mean": float(lengths.mean()),
        "completion/length_p95": float(np.percentile(lengths, 95)),
        "completion/truncated_fraction": float(np.mean([trajectory.truncated for trajectory in trajectories])),
        "tokens/completion": float(lengths.sum()),
        "tokens/prompt": float(prompt_tokens),
    }


def source_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Measure the groups of each training set, by the source of their prompts; nothing if there is only one."""
    by_source: dict[str, list[Group]] = {}
    for group in groups:
        by_source.setdefault(group.prompt.source, []).append(group)
    if len(by_source) < 2:
        return {}

    metrics: dict[str, float] = {}
    for name, members in by_source.items():
        trajectories = [trajectory for group in members for trajectory in group.trajectories]
        metrics[f"source/{name}/groups"] = float(len(members))
        metrics[f"source/{name}/reward"] = float(np.mean([trajectory.reward for trajectory in trajectories]))
        metrics[f"source/{name}/accuracy"] = float(np.mean([correct(trajectory) for trajectory in trajectories]))
    return metrics


def correct(trajectory: Trajectory) -> bool:
    """Whether the `exact` or `math` component is 1; without either component, whether the reward is above 0.5."""
    components = trajectory.reward_components
    verdicts = [components[name] for name in CORRECTNESS_COMPONENTS if name in components]
    return max(verdicts) == 1 if verdicts else trajectory.reward > 0.5


@functools.lru_cache(4096)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k from c correct completions out of n ≥ k (arXiv 2107.03374, section 2.1).

    1 − C(n − c, k) / C(n, k), computed as a product that cannot overflow.

    >>> pass_at_k(4, 1, 2)
    0.5

    Raises:
        ValueError: Unless 0 < k ≤ n and 0 ≤ c ≤ n.
    """
    if not 0 < k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} is not defined for {c} correct completions out of {n}")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def advantage_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Measure the spread of a step's advantages over its trajectories."""
    advantages = np.concatenate([group.advantages for group in scored]).astype(np.float64)
    return {
        "advantage/std": float(advantages.std()),
        "advantage/min": float(advantages.min()),
        "advantage/max": float(advantages.max()),
    }


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Staleness of trajectories in weight syncs: trained `version` − oldest version that sampled one of the tokens."""
    staleness = [version - t.oldest_version for group in groups for t in group.trajectories]
    return {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}


def _component_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each reward component over the trajectories that have it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.reward_components})
    values = {name: [t.reward_components[name] for t in trajectories if name in t.reward_components] for name in names}
    return {f"reward/{name}": float(np.mean(each)) for name, each in values.items()}

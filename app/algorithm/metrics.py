"""Metrics, each with a denominator of its own.

`TABLE` is the one place that says what a summed training metric is divided by. The loss gives raw sums per microbatch;
the trainer merges them over microbatches and ranks, and `finalise` divides once, by global counts, when the update is
done. One scalar for all would be wrong, and so would a mean of per-rank means. The rest of this file measures groups on
the driver, where the raw rewards are.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np

from app.types import Group, ScoredGroup, Trajectory

CORRECTNESS_PARTS = ("exact", "math")  # built-in reward parts that are 1 exactly where the answer is right


class Over(Enum):
    """What a raw value is divided by when the update is done."""

    tokens = "tokens"
    sequences = "sequences"
    loss = "loss"  # the loss's own denominator
    max = "max"  # merged by max, never divided
    min = "min"  # merged by min, never divided
    part = "part"  # a sum that only others are made of; not reported


TABLE: Mapping[str, Over] = {
    "loss/total": Over.loss,
    "loss/policy": Over.loss,  # the terms that the total is made of, coefficients included
    "loss/kl": Over.loss,
    "loss/entropy": Over.loss,
    "entropy": Over.tokens,
    "ratio/mean": Over.tokens,
    "ratio/sequence_mean": Over.sequences,  # the geometric mean over each sequence, GSPO's ratio
    "ratio/max": Over.max,
    "ratio/min": Over.min,
    "clip/low_fraction": Over.tokens,
    "clip/high_fraction": Over.tokens,
    "clip/dual_fraction": Over.tokens,
    "kl/old": Over.tokens,  # k3 of KL(π_old ‖ π)
    "kl/reference": Over.tokens,  # k3 of KL(π ‖ π_ref)
    "mismatch/kl": Over.tokens,  # k3 of KL(π_sampler ‖ π_old of the trainer)
    "mismatch/abs_difference": Over.tokens,  # of log-probabilities
    "mismatch/max_ratio": Over.max,
    "mismatch/weight": Over.part,
    "mismatch/weight_square": Over.part,
    "mismatch/masked_fraction": Over.tokens,  # zeroed by the correction
}


def merge(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Raw sums of two microbatches, or ranks, as those of both. Neutral element: an empty mapping."""
    merged = dict(one)
    for name, value in other.items():
        merged[name] = _combine(name, merged[name], value) if name in merged else value
    return merged


def _combine(name: str, one: float, other: float) -> float:
    match TABLE[name]:
        case Over.max:
            return max(one, other)
        case Over.min:
            return min(one, other)
        case _:
            return one + other


def finalise(sums: Mapping[str, float], *, tokens: float, sequences: float, loss: float) -> dict[str, float]:
    """The metrics of an update, from sums and counts over all its microbatches and ranks.

    `tokens` and `sequences` count the unmasked batch; `loss` is `loss.denominator` of them. Without any token every
    metric is 0.
    """
    if tokens == 0:
        return {name: 0.0 for name in sums if TABLE[name] is not Over.part}
    counts = {Over.tokens: tokens, Over.sequences: sequences, Over.loss: loss, Over.max: 1.0, Over.min: 1.0}
    metrics = {name: value / counts[TABLE[name]] for name, value in sums.items() if TABLE[name] is not Over.part}
    if "mismatch/weight" in sums:  # (Σw)² / (N · Σw²): 1 where all weights are equal
        metrics["mismatch/effective_sample_size"] = sums["mismatch/weight"] ** 2 / (
            tokens * sums["mismatch/weight_square"]
        )
    return metrics


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, correctness and lengths of a step's groups (at least one). Rewards are the raw ones."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.concatenate([group.rewards for group in groups])
    lengths = np.array([len(trajectory.completion.token_ids) for trajectory in trajectories], dtype=np.float64)
    prompts = sum(len(group.prompt.token_ids) for group in groups)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/accuracy": float(np.mean([correct(trajectory) for trajectory in trajectories])),
        **_part_metrics(trajectories),
        **_pass_metrics(groups),
        "reward/zero_std_fraction": float(np.mean([np.ptp(group.rewards) == 0 for group in groups])),
        "completion/length_mean": float(lengths.mean()),
        "completion/length_p95": float(np.percentile(lengths, 95)),
        "completion/truncated_fraction": float(np.mean([t.completion.truncated for t in trajectories])),
        "tokens/completion": float(lengths.sum()),
        "tokens/prompt": float(prompts),
    }


def correct(trajectory: Trajectory) -> bool:
    """Whether the answer is right: its `exact` or `math` part is 1; where the reward has neither, it is above 0.5."""
    judged = [trajectory.reward_components[name] for name in CORRECTNESS_PARTS if name in trajectory.reward_components]
    return max(judged) == 1 if judged else trajectory.reward > 0.5


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k completions is right, from c right ones of n ≥ k (arXiv 2107.03374, section 2.1).

    Unbiased: 1 − C(n − c, k) / C(n, k), as a product that cannot overflow.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 < k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {c} right ones in {n} is not defined")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def advantage_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """The spread of a step's advantages, over trajectories."""
    advantages = np.concatenate([group.advantages for group in scored]).astype(np.float64)
    return {
        "advantage/std": float(advantages.std()),
        "advantage/min": float(advantages.min()),
        "advantage/max": float(advantages.max()),
    }


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Staleness over trajectories, in pushes: version being trained − oldest that sampled one of the tokens."""
    staleness = [version - t.completion.oldest_version for group in groups for t in group.trajectories]
    return {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}


def _part_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each reward part over the trajectories that have it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.reward_components})
    values = {name: [t.reward_components[name] for t in trajectories if name in t.reward_components] for name in names}
    return {f"reward/{name}": float(np.mean(values[name])) for name in names}


def _pass_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """pass@k for the powers of two up to the smallest group, the mean over groups."""
    smallest = min(len(group.trajectories) for group in groups)
    right = [(len(group.trajectories), sum(map(correct, group.trajectories))) for group in groups]
    ks = [2**power for power in range(smallest.bit_length()) if 2**power <= smallest]
    return {f"reward/pass@{k}": float(np.mean([pass_at_k(n, c, k) for n, c in right])) for k in ks}

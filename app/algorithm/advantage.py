"""Group-relative advantages (GRPO) from rewards shaped by soft overlong punishment (DAPO).

Invariants:
- Raw rewards are never modified; shaping returns a new array.
- Dynamic sampling filters on raw rewards. Shaped rewards would hide that all answers of a group are right or all wrong.
"""

import numpy as np

from app.config.algorithm import AlgorithmConfig
from app.types import Group, ScoredGroup, Trajectory

STD_EPSILON = 1e-6
SMALLEST_GROUP = 2  # an advantage compares at least two trajectories


def score(group: Group, config: AlgorithmConfig, *, max_completion_tokens: int) -> ScoredGroup:
    """Compute the advantages [G] of a group, each shared by all tokens that were sampled for it.

    Â = (r − mean) / (std + 1e-6) of the shaped rewards (DeepSeekMath, arXiv 2402.03300, section 4.1.2), or r − mean
    without `normalize_by_std` (Dr. GRPO). The paper does not define the std. This is the sample std (divided by
    G − 1), as in verl, slime and TRL (`torch.std`), with verl's epsilon (TRL: 1e-4). A group of equal rewards gets
    exact zeros.

    Raises:
        ValueError: If a reward is not finite, for example because the group was never scored.
    """
    rewards = shaped_rewards(group, config, max_completion_tokens=max_completion_tokens)
    if not np.isfinite(rewards).all():
        raise ValueError(f"prompt {group.prompt.id} has rewards that are not finite: {rewards.tolist()}")

    if rewards.min() == rewards.max():
        return ScoredGroup(group, np.zeros(len(rewards), dtype=np.float32))

    advantages = rewards - rewards.mean()
    if config.normalize_by_std:
        advantages = advantages / (rewards.std(ddof=1) + STD_EPSILON)
    return ScoredGroup(group, advantages.astype(np.float32))


def shaped_rewards(group: Group, config: AlgorithmConfig, *, max_completion_tokens: int) -> np.ndarray:
    """Return raw rewards plus the overlong punishment of each trajectory: [G] float64, a new array."""
    buffer = config.overlong_buffer_tokens(max_completion_tokens)
    punishments = [
        overlong_punishment(trajectory.response_tokens, limit=max_completion_tokens, buffer=buffer)
        for trajectory in group.trajectories
    ]
    return group.rewards + config.overlong_penalty * np.array(punishments, dtype=np.float64)


def overlong_punishment(tokens: int, *, limit: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to `limit − buffer` tokens, −1 at `limit`.

    >>> [overlong_punishment(tokens, limit=16, buffer=4) for tokens in (12, 13, 16, 17)]
    [0.0, -0.25, -1.0, -1.0]
    """
    excess = tokens - (limit - buffer)
    if buffer == 0 or excess <= 0:
        return 0.0
    return -min(excess / buffer, 1.0)


def has_reward_variance(group: Group) -> bool:
    """Whether the raw rewards differ. Dynamic sampling drops groups without variance (DAPO, section 3.2)."""
    return bool(group.rewards.min() != group.rewards.max())


def contributes_gradient(trajectory: Trajectory, *, mask_truncated: bool) -> bool:
    """False for a truncated trajectory under `mask_truncated` (DAPO's overlong filtering, section 3.4)."""
    return not (mask_truncated and trajectory.truncated)

"""From raw rewards to advantages: overlong punishment (DAPO), then relative to the group (GRPO).

The raw rewards stay where they are: shaping happens on a copy, and dynamic sampling asks the raw ones, because a
punishment for length would hide that a group's answers are all right or all wrong.
"""

import numpy as np

from app.config.algorithm import AlgorithmConfig
from app.types import Completion, Group, ScoredGroup

STD_EPSILON = 1e-6


def score(group: Group, config: AlgorithmConfig, *, max_completion_tokens: int) -> ScoredGroup:
    """The group with its advantages [G], the same for every token of a completion.

    Â = (r − mean) / (std + 1e-6) of the shaped rewards (DeepSeekMath, arXiv 2402.03300, section 4.1.2), or r − mean
    without `normalize_by_std` (Dr. GRPO). The paper does not say which std; we take the sample's (divided by G − 1) as
    verl, slime and TRL do with `torch.std`, and verl's epsilon (TRL: 1e-4). A group without spread gets exact zeros.
    Raises `ValueError` for a reward that is not finite: it was not scored yet.
    """
    rewards = shaped_rewards(group, config, max_completion_tokens=max_completion_tokens)
    if not np.isfinite(rewards).all():
        raise ValueError(f"the rewards of prompt {group.prompt.id} are not all finite: {rewards.tolist()}")
    if rewards.min() == rewards.max():
        return ScoredGroup(group, np.zeros(len(rewards), dtype=np.float32))
    advantages = rewards - rewards.mean()
    if config.normalize_by_std:
        advantages = advantages / (rewards.std(ddof=1) + STD_EPSILON)
    return ScoredGroup(group, advantages.astype(np.float32))


def shaped_rewards(group: Group, config: AlgorithmConfig, *, max_completion_tokens: int) -> np.ndarray:
    """Raw rewards plus the overlong punishment of each completion: [G] float64, a new array."""
    buffer = config.overlong_buffer_tokens(max_completion_tokens)
    punishments = [
        overlong_punishment(len(trajectory.completion.token_ids), limit=max_completion_tokens, buffer=buffer)
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
    """Whether the raw rewards differ, so that the group teaches something (DAPO, section 3.2)."""
    return bool(group.rewards.min() != group.rewards.max())


def earns_gradient(completion: Completion, config: AlgorithmConfig) -> bool:
    """False for truncated completions under `mask_truncated` (DAPO's overlong filtering, section 3.4)."""
    return not (config.mask_truncated and completion.truncated)

"""Group-relative advantages (GRPO) from rewards shaped by soft overlong punishment (DAPO).

Invariants:
- Raw rewards are never modified; shaping returns a new array.
- Dynamic sampling filters on raw rewards. Shaped rewards would hide that all answers of a group are right or all wrong.
"""

import numpy as np

from app.config.algorithm import AlgorithmConfig
from app.errors import RunError
from app.types import Group, ScoredGroup, Trajectory
from app.utils.user_code import resolve

STD_EPSILON = 1e-6


def score(group: Group, config: AlgorithmConfig, *, max_completion_tokens: int) -> ScoredGroup:
    """Compute the advantages [G] of a group, each shared by all tokens that were sampled for it.

    A group of equal rewards gets exact zeros, as does every group with `reward_coefficient` 0.

    Raises:
        ValueError: If a reward is not finite, for example because the group was never scored.
        RunError: `algorithm.advantage` cannot use these rewards.
    """
    if config.reward_coefficient == 0:
        return ScoredGroup(group, np.zeros(len(group.trajectories), dtype=np.float32))

    rewards = shaped_rewards(group, config, max_completion_tokens=max_completion_tokens)
    if not np.isfinite(rewards).all():
        raise ValueError(f"prompt {group.prompt.id} has rewards that are not finite: {rewards.tolist()}")

    if rewards.min() == rewards.max():
        return ScoredGroup(group, np.zeros(len(rewards), dtype=np.float32))

    try:
        advantages = estimate(rewards, config)
    except ValueError as error:
        failed = f"algorithm.advantage={config.advantage} failed for prompt {group.prompt.id}"
        raise RunError(f"{failed}: {error}") from error
    return ScoredGroup(group, (config.reward_coefficient * advantages).astype(np.float32))


def estimate(rewards: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return the advantages [G] of unequal rewards [G], by `algorithm.advantage`. Raises `ValueError`."""
    match config.advantage:
        case "grpo":
            return grpo(rewards, normalize_by_std=config.normalize_by_std)
        case "rloo":
            return rloo(rewards)
        case "maxrl":
            return maxrl(rewards)

    advantages = np.asarray(resolve(config.advantage)(rewards.copy()), dtype=np.float64)
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        raise ValueError(f"for the rewards {rewards.tolist()} it returned {advantages.tolist()}")
    return advantages


def grpo(rewards: np.ndarray, *, normalize_by_std: bool) -> np.ndarray:
    """(r − mean) / (std + 1e-6) (DeepSeekMath, arXiv 2402.03300, section 4.1.2), or r − mean (Dr. GRPO).

    The paper does not define the std. This is the sample std (divided by G − 1), as in verl, slime and TRL
    (`torch.std`), with verl's epsilon (TRL: 1e-4).
    """
    advantages: np.ndarray = rewards - rewards.mean()
    return advantages / (rewards.std(ddof=1) + STD_EPSILON) if normalize_by_std else advantages


def rloo(rewards: np.ndarray) -> np.ndarray:
    """Reward minus the mean of the group's other rewards (RLOO, arXiv 2402.14740), an unbiased baseline."""
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


def maxrl(rewards: np.ndarray) -> np.ndarray:
    """(r − mean) / mean (MaxRL, arXiv 2602.02710): with rewards of 0 and 1, rare successes weigh most."""
    if rewards.min() < 0:
        raise ValueError(f"it needs rewards of at least 0, and got {rewards.min():g}")
    return (rewards - rewards.mean()) / rewards.mean()


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


def contributes_gradient(trajectory: Trajectory, *, mask_truncated: bool) -> bool:
    """False for a truncated trajectory under `mask_truncated` (DAPO's overlong filtering, section 3.4)."""
    return not (mask_truncated and trajectory.truncated)

"""Group-relative advantages (GRPO), and what a teacher takes off them.

Invariant: raw rewards are never modified; shaping returns a new array.
"""

from typing import TYPE_CHECKING

import numpy as np

from app.algorithm.overlong import shaped_rewards
from app.config.algorithm import AlgorithmConfig
from app.config.teacher import TeacherConfig
from app.errors import RunError
from app.types import Group, ScoredGroup
from app.utils.user_code import resolve

if TYPE_CHECKING:  # the driver computes advantages without torch
    from torch import Tensor

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


def teacher_penalty(logprobs: "Tensor", teacher_logprobs: "Tensor", teacher: TeacherConfig) -> "Tensor":
    """λ · clip(log π − log π_teacher) of each token [N], detached, which is taken off its advantage.

    On tokens sampled from π its expected gradient is that of the reverse KL of each token's distribution,
    KL(π ‖ π_teacher).
    """
    difference = logprobs.detach() - teacher_logprobs
    return teacher.coefficient * difference.clamp(-teacher.clip, teacher.clip)

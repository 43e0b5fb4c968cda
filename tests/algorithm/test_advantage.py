"""Advantages against a plain loop, overlong punishment against DAPO's eq. 13, and the filter of dynamic sampling."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.algorithm.advantage import score
from app.algorithm.filter import RolloutCounts
from app.algorithm.overlong import contributes_gradient, overlong_punishment, shaped_rewards
from app.config.algorithm import AlgorithmConfig
from app.errors import RunError

from .groups import group

GRPO = AlgorithmConfig()
DR_GRPO = AlgorithmConfig(normalize_by_std=False)
DAPO = AlgorithmConfig(overlong_buffer_fraction=0.2, dynamic_sampling=True)
REWARDS = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=16)


def dapo_length_reward(length: int, limit: int, cache: int) -> float:
    """Eq. 13 as printed."""
    if length <= limit - cache:
        return 0.0
    if length <= limit:
        return ((limit - cache) - length) / cache
    return -1.0


@given(REWARDS)
def test_advantages_equal_the_paper_and_rewards_are_unchanged(rewards: list[float]) -> None:
    unscored = group(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deviation = statistics.stdev(rewards) if max(rewards) > min(rewards) else 0.0
    expected = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
    scored = score(unscored, GRPO, max_completion_tokens=8)
    assert scored.advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    centered = score(unscored, DR_GRPO, max_completion_tokens=8).advantages
    assert centered.tolist() == pytest.approx([reward - mean for reward in rewards], rel=1e-5, abs=1e-6)
    assert scored.group is unscored
    assert unscored.rewards.tolist() == rewards


@given(st.floats(-5, 5), st.integers(1, 16))
def test_a_group_without_variance_has_advantages_of_exactly_zero(reward: float, size: int) -> None:
    assert score(group([reward] * size), GRPO, max_completion_tokens=8).advantages.tolist() == [0.0] * size


@given(st.integers(1, 64), st.integers(0, 80), st.floats(0, 1))
def test_overlong_punishment_is_eq_13(limit: int, length: int, fraction: float) -> None:
    buffer = AlgorithmConfig(overlong_buffer_fraction=fraction).overlong_buffer_tokens(limit)
    assert 0 <= buffer <= limit
    expected = dapo_length_reward(length, limit, buffer) if buffer else 0.0  # off without a buffer
    assert overlong_punishment(length, limit=limit, buffer=buffer) == pytest.approx(expected, abs=1e-12)


def test_long_correct_answers_earn_less_than_short_ones_and_the_filter_uses_raw_rewards() -> None:
    unscored = group([1, 1, 0, 0], lengths=[5, 10, 5, 10])
    assert shaped_rewards(unscored, DAPO, max_completion_tokens=10).tolist() == [1, 0, 0, -1]
    assert unscored.rewards.tolist() == [1, 1, 0, 0]
    advantages = score(unscored, DAPO, max_completion_tokens=10).advantages
    assert advantages[0] > advantages[1] == advantages[2] > advantages[3]

    right = group([1, 1], lengths=[5, 10])
    assert shaped_rewards(right, DAPO, max_completion_tokens=10).tolist() == [1, 0]
    assert not RolloutCounts().keep(right, DAPO)


@given(REWARDS)
def test_the_filter_keeps_exactly_the_groups_with_two_different_rewards(rewards: list[float]) -> None:
    assert RolloutCounts().keep(group(rewards), DAPO) == (len(set(rewards)) > 1)


def test_truncated_completions_contribute_no_gradient_only_under_mask_truncated() -> None:
    stopped, truncated = group([0, 0], truncated=[False, True]).trajectories
    for mask_truncated, expected in ((True, [True, False]), (False, [True, True])):
        assert [contributes_gradient(t, mask_truncated=mask_truncated) for t in (stopped, truncated)] == expected


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_group_without_rewards_is_rejected_with_its_prompt_id(reward: float) -> None:
    with pytest.raises(ValueError, match="test/0@0"):
        score(group([1, reward]), GRPO, max_completion_tokens=8)


@given(REWARDS)
def test_rloo_compares_each_reward_with_the_mean_of_the_others(rewards: list[float]) -> None:
    advantages = score(group(rewards), AlgorithmConfig(advantage="rloo"), max_completion_tokens=8).advantages
    others = [rewards[:index] + rewards[index + 1 :] for index in range(len(rewards))]
    expected = [reward - math.fsum(rest) / len(rest) for reward, rest in zip(rewards, others, strict=True)]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_maxrl_divides_by_the_mean_reward() -> None:
    config = AlgorithmConfig(advantage="maxrl")
    assert score(group([1, 0, 0, 0]), config, max_completion_tokens=8).advantages.tolist() == [3, -1, -1, -1]
    assert score(group([0, 0, 0, 0]), config, max_completion_tokens=8).advantages.tolist() == [0, 0, 0, 0]
    with pytest.raises(RunError, match=r"algorithm\.advantage=maxrl"):
        score(group([1, -1, 0, 0]), config, max_completion_tokens=8)

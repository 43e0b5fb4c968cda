"""Group metrics, merging of raw sums, and pass@k against counting all draws."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.algorithm.advantage import score
from app.algorithm.metrics import (
    TABLE,
    advantage_metrics,
    correct,
    group_metrics,
    merge,
    pass_at_k,
    source_metrics,
    staleness_metrics,
)
from app.config.algorithm import AlgorithmConfig
from app.types import Group

from .groups import group

SUMS = st.dictionaries(st.sampled_from(sorted(TABLE)), st.integers(-100, 100).map(float))


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_fraction_of_draws_with_a_correct_answer(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations(range(n), k))
    fraction = sum(any(index < c for index in draw) for draw in draws) / len(draws)
    assert pass_at_k(n, c, k) == pytest.approx(fraction, abs=1e-12)


def test_pass_at_k_of_many_completions_does_not_overflow() -> None:
    exact = 1 - math.comb(9_900, 512) / math.comb(10_000, 512)
    assert pass_at_k(10_000, 100, 512) == pytest.approx(exact, rel=1e-9)


def test_group_metrics_of_two_groups_counted_by_hand() -> None:
    first = group([1, 0, 0, 0], lengths=[2, 4, 6, 8], truncated=[False, False, False, True], prompt_tokens=5)
    second = group([1, 1, 1, 1], lengths=[10] * 4, prompt_tokens=7)
    measured = group_metrics([first, second])
    assert measured == pytest.approx(
        {
            "reward/mean": 5 / 8,
            "reward/std": math.sqrt(15) / 8,
            "reward/accuracy": 5 / 8,
            "reward/pass@1": (1 / 4 + 1) / 2,
            "reward/pass@2": (1 / 2 + 1) / 2,
            "reward/pass@4": 1.0,
            "reward/zero_std_fraction": 0.5,
            "reward/all_correct_fraction": 0.5,
            "reward/all_wrong_fraction": 0.0,
            "completion/identical_fraction": 0.5,
            "completion/length_mean": 7.5,
            "completion/length_p95": 10.0,
            "completion/truncated_fraction": 1 / 8,
            "tokens/completion": 60.0,
            "tokens/prompt": 12.0,
        }
    )


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=8), min_size=1, max_size=5))
def test_accuracy_and_pass_at_k_agree_with_each_other(answers: list[list[bool]]) -> None:
    measured = group_metrics([group([float(correct) for correct in group_answers]) for group_answers in answers])
    flat = [correct for group_answers in answers for correct in group_answers]
    assert measured["reward/accuracy"] == pytest.approx(sum(flat) / len(flat))
    assert measured["reward/mean"] == pytest.approx(measured["reward/accuracy"])
    assert measured["reward/pass@1"] <= measured["reward/pass@2"] + 1e-12 <= measured["reward/pass@4"] + 2e-12
    assert measured["reward/zero_std_fraction"] == np.mean([len(set(group_answers)) == 1 for group_answers in answers])
    assert measured["reward/all_correct_fraction"] == np.mean([all(group_answers) for group_answers in answers])
    assert measured["reward/all_wrong_fraction"] == np.mean([not any(group_answers) for group_answers in answers])
    assert ("reward/pass@8" in measured) == (min(map(len, answers)) == 8)


def test_accuracy_uses_the_answer_component_and_without_one_a_reward_above_one_half() -> None:
    answered = group(
        [0.1, 1.1, 0.9], components=[{"exact": 0, "mean": 1}, {"exact": 1, "mean": 1}, {"exact": 0, "mean": 9}]
    )
    measured = group_metrics([answered])
    assert measured["reward/accuracy"] == measured["reward/exact"] == pytest.approx(1 / 3)
    assert measured["reward/mean"] == pytest.approx(0.7)  # not the component of that name
    own = group([0.5, 0.6, -1.0], components=[{"mine": 3.0}] * 3)
    assert [correct(trajectory) for trajectory in own.trajectories] == [False, True, False]


def test_staleness_counts_from_the_oldest_version_of_each_trajectory() -> None:
    measured = staleness_metrics([group([0, 0], lengths=[2, 2], versions=[3, 5]), group([0], [2], versions=[4])], 5)
    assert measured == {"staleness/mean": 1.0, "staleness/max": 2.0}


def test_advantage_metrics_measure_the_spread() -> None:
    scored = [score(group([1, 0, 0, 0]), AlgorithmConfig(normalize_by_std=False), max_completion_tokens=8)]
    measured = advantage_metrics(scored)
    assert measured == pytest.approx(
        {"advantage/std": math.sqrt(3) / 4, "advantage/min": -0.25, "advantage/max": 0.75}, rel=1e-6
    )


@given(SUMS, SUMS, SUMS)
def test_merging_is_associative_commutative_and_has_a_neutral_element(
    one: dict[str, float], two: dict[str, float], three: dict[str, float]
) -> None:
    assert merge(merge(one, two), three) == merge(one, merge(two, three))
    assert merge(one, two) == merge(two, one)
    assert merge(one, {}) == merge({}, one) == one


def test_groups_of_several_sources_are_measured_by_source() -> None:
    def of(source: str, rewards: list[float]) -> Group:
        plain = group(rewards)
        prompt = replace(plain.prompt, source=source)
        return Group(prompt, plain.trajectories)

    groups = [of("easy", [1.0, 1.0]), of("hard", [0.0, 0.5]), of("hard", [1.0, 0.0])]
    assert source_metrics(groups) == {
        "source/easy/groups": 1.0,
        "source/easy/reward": 1.0,
        "source/easy/accuracy": 1.0,
        "source/hard/groups": 2.0,
        "source/hard/reward": 0.375,
        "source/hard/accuracy": 0.25,
    }
    assert source_metrics(groups[1:]) == {}

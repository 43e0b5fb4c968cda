"""When evaluations are due, and what they measure."""

import doctest

import pytest

from app.config.eval import EvalConfig
from app.eval import evaluate
from app.eval.evaluate import is_due, measure
from tests.algorithm.groups import group


@pytest.mark.parametrize(
    ("every", "before_train", "expected"),
    [(0, True, [0, 6]), (0, False, [6]), (4, True, [0, 4, 6]), (1, False, [1, 2, 3, 4, 5, 6])],
)
def test_evaluations_are_due_as_configured_and_after_the_last_step(
    every: int, before_train: bool, expected: list[int]
) -> None:
    config = EvalConfig(every=every, before_train=before_train)
    assert [step for step in range(7) if is_due(config, step=step, last_step=6)] == expected


def test_an_evaluation_measures_accuracy_reward_and_length() -> None:
    measured = measure([group([1.0, 0.0], [3, 5]), group([1.0, 1.0], [1, 7], truncated=[False, True])])
    assert (measured["accuracy"], measured["reward"], measured["length_mean"]) == (0.75, 0.75, 4.0)
    assert measured["truncated_fraction"] == 0.25


def test_the_example_in_the_docstring_holds() -> None:
    results = doctest.testmod(evaluate)
    assert results.attempted > 0
    assert results.failed == 0

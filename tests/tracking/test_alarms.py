from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from app.tracking.rules import Alarms


def run(steps: Iterable[Mapping[str, float]], **settings: Any) -> list[tuple[int, str]]:
    """Return (step, name) of every alarm that these metrics raise."""
    alarms = Alarms(**settings)
    return [(step, name) for step, metrics in enumerate(steps, 1) for name in alarms.check(step, metrics)]


HEALTHY = {
    "reward/zero_std_fraction": 0.3,
    "reward/accuracy": 0.5,
    "reward/failed_fraction": 0.0,
    "mismatch/kl": 1e-7,
    "entropy": 1.0,
    "completion/truncated_fraction": 0.1,
    "throughput/completion_tokens_per_second": 1000.0,
    "staleness/mean": 1.0,
    "updates/skipped": 0.0,
}
FLAT = {"reward/zero_std_fraction": 1.0}
ZERO = {"reward/accuracy": 0.0}
COPIES = {**FLAT, "completion/identical_fraction": 1.0}
STILL = {"updates/relative_change": 1e-8, "grad_norm": 0.5}
SOLVED = {**FLAT, "reward/accuracy": 1.0}


def steps(count: int, **changes: float) -> list[dict[str, float]]:
    return [{**HEALTHY, **changes} for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "changes", "needed"),
    [
        ("no reward variance", FLAT, 3),
        ("mismatch", {"mismatch/kl": 0.01}, 1),
        ("mismatch", {"mismatch/kl": 0.5, "staleness/max": 1.0}, 1),
        ("entropy collapse", {"entropy": 0.04}, 1),
        ("truncated completions", {"completion/truncated_fraction": 1.0}, 2),
        ("throughput", {"throughput/completion_tokens_per_second": 400.0}, 3),
        ("staleness", {"staleness/mean": 2.0}, 5),
        ("staleness", {"staleness/max": 3.0}, 1),
        ("reward failures", {"reward/failed_fraction": 0.1}, 1),
        ("failed episodes", {"environment/failed_fraction": 0.06}, 1),
        ("gradient not finite", {"updates/skipped": 1.0}, 1),
    ],
)
def test_each_problem_raises_its_alarm_once_after_its_number_of_steps(
    name: str, changes: dict[str, float], needed: int
) -> None:
    assert run(steps(15) + steps(8, **changes), max_staleness=2) == [(15 + needed, name)]


@pytest.mark.parametrize(
    ("rows", "raised"),
    [
        # Equal rewards are expected once a run has learned, and not before.
        (steps(12, **SOLVED), [(3, "no reward variance")]),
        (steps(5) + steps(12, **SOLVED), []),
        (steps(12, **{"reward/zero_std_fraction": 0.8}), [(10, "no reward variance")]),  # most of them for long
        # Copies of one completion, unless they are right.
        (steps(3, **COPIES), [(3, "no reward variance"), (3, "identical completions")]),
        (steps(12, **{"completion/identical_fraction": 0.9, "reward/all_correct_fraction": 0.8}), []),
        # A reward of the wrong sign, or of another scale; where all are equal another alarm says so.
        (steps(12, **ZERO), [(10, "accuracy of 0")]),
        (steps(1) + steps(9, **ZERO), []),
        (steps(12, **ZERO, **FLAT), [(3, "no reward variance")]),
        # Weights that no update moves, and not those at the end of a decay or without a gradient.
        (steps(9, **STILL), [(5, "unmoved weights")]),
        ([{**HEALTHY, **STILL, "updates/relative_change": 5e-5 * 0.8**step} for step in range(80)], []),
        (steps(9, **{**STILL, "grad_norm": 0.0}), []),
        # Low entropy while most answers are correct.
        (steps(6, **{"reward/accuracy": 0.95}) + steps(14, **{"entropy": 0.01, "reward/accuracy": 0.95}), []),
        # At a bound of 1 staleness means that phases overlap, and the log-probabilities of an older policy differ.
        (steps(10, **{"staleness/max": 1.0, "mismatch/kl": 0.09}), []),
    ],
)
def test_a_problem_is_told_from_what_is_expected(rows: list[dict[str, float]], raised: list[tuple[int, str]]) -> None:
    assert run(rows, max_staleness=1) == raised


def test_an_alarm_is_raised_again_only_after_its_problem_ended_and_a_growing_number_of_quiet_steps() -> None:
    flicker = (steps(1, **{"mismatch/kl": 0.5}) + steps(1)) * 60
    assert [step for step, _ in run(steps(10) + flicker)] == [11, 31, 111]


@pytest.mark.parametrize(
    ("accuracy", "slope", "stderr", "raised"),
    [
        (0.1, 0.05, 0.02, ["reward against accuracy"]),
        (0.1, 0.0, 0.02, []),  # the reward does not rise
        (0.28, 0.05, 0.02, []),  # within the noise
        (0.1, 0.05, 0.1, []),  # of few rows
        (0.6, 0.05, 0.02, []),
    ],
)
def test_a_reward_that_rises_while_the_held_out_accuracy_falls_is_an_alarm(
    accuracy: float, slope: float, stderr: float, raised: list[str]
) -> None:
    """The evaluation of a step is checked after the step."""
    alarms = Alarms()
    assert alarms.check(0, {"eval/accuracy": 0.3, "eval/accuracy_stderr": stderr}) == {}
    for step in range(1, 21):
        assert alarms.check(step, {**HEALTHY, "reward/mean": slope * step + 0.01 * (step % 2)}) == {}
    assert list(alarms.check(20, {"eval/accuracy": accuracy, "eval/accuracy_stderr": stderr})) == raised

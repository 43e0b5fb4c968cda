"""Failed episodes are counted by kind and as a share of all; too many in a step end the run."""

import pytest

from app.errors import RunError
from app.rollout.episodes.player import episode_failures

RAISED = "step raised KeyError: 'board' at envs.py:7"


def test_the_share_of_failed_episodes_is_that_of_the_whole_run_and_windows_begin_anew() -> None:
    failures = episode_failures(0.25, 4, lambda text: None)
    for _ in range(3):  # one of four: at the limit of each window
        for outcome in (None, RAISED, None, None):
            failures.count(outcome)
    failures.by_kind["raised"] += 1
    assert failures.metrics == {"environment/failed_fraction": 0.25, "environment/failed_raised": 1.0}
    assert (failures.failed, failures.total) == (3, 12)


def test_before_any_episode_there_is_no_share() -> None:
    assert episode_failures(0.1, 4, lambda text: None).metrics["environment/failed_fraction"] == 0.0


def test_more_failures_than_a_window_allows_end_the_run_with_the_last_reason() -> None:
    failures = episode_failures(0.25, 4, lambda text: None)
    failures.count(RAISED)
    with pytest.raises(
        RunError, match=r"2 of 2 episodes failed .* environment.max_failed_fraction=0.25 .* envs.py:7\.$"
    ):
        failures.count(RAISED)


def test_the_first_failure_of_a_kind_is_a_warning_and_then_the_tenth() -> None:
    warned: list[str] = []
    failures = episode_failures(1.0, 4, warned.append)
    for _ in range(12):
        failures.warn("raised", "an episode", RAISED)
    assert len(warned) == 2
    assert warned[0].startswith("an episode failed: step raised KeyError: 'board' at envs.py:7. ")
    assert "(10 times so far)" in warned[1]

"""Failed episodes are counted by kind and as a share of all; too many in a step end the run (`test_episodes.py`)."""

from app.rollout.episodes.episode_group import episode_failures

RAISED = "step raised KeyError: 'board' at envs.py:7"


def test_the_share_of_failed_episodes_is_that_of_the_whole_run_and_windows_begin_anew() -> None:
    failures = episode_failures(0.25, 4, lambda text: None)
    assert failures.metrics == {"environment/failed_fraction": 0.0}
    for _ in range(3):  # one of four: at the limit of each window
        for outcome in (None, RAISED, None, None):
            failures.count(outcome)
    failures.by_kind["raised"] += 1
    assert failures.metrics == {"environment/failed_fraction": 0.25, "environment/failed_raised": 1.0}
    assert (failures.failed, failures.total) == (3, 12)


def test_the_first_failure_of_a_kind_is_a_warning_and_then_the_tenth() -> None:
    warned: list[str] = []
    failures = episode_failures(1.0, 4, warned.append)
    for _ in range(12):
        failures.warn("raised", "an episode", RAISED)
    assert len(warned) == 2
    assert warned[0].startswith(f"an episode failed: {RAISED}. ")
    assert "(10 times so far)" in warned[1]

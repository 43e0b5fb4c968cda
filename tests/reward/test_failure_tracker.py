import pytest

from app.errors import RunError
from app.reward.outcome import FailureKind
from tests.reward.scorers import running_scorer, score


def test_too_many_failures_in_a_step_end_the_run_and_the_error_shows_the_last(custom_reward, trajectory):
    module = custom_reward("def broken(trajectories):\n    raise KeyError('score')\n")
    with running_scorer(_target_=f"{module}.broken", max_failed_fraction=0.25, step_trajectories=16) as scorer:
        assert score(scorer, [trajectory("a")] * 4) == [0, 0, 0, 0]
        with pytest.raises(RunError) as caught:
            score(scorer, [trajectory("a")])
    message = str(caught.value)
    assert message.startswith(
        "The reward failed on 5 of 5 trajectories, more than reward.max_failed_fraction=0.25 of a step's 16 allows; "
        "last failure: component broken, exception: KeyError: 'score' at "
    )
    assert message.endswith(f"{module}.py:2.")


def test_the_allowed_number_of_failures_in_every_step_never_ends_the_run(custom_reward, trajectory):
    module = custom_reward(
        "def partial(trajectories):\n    return [float('nan') if one.text == 'x' else 1 for one in trajectories]\n"
    )
    with running_scorer(_target_=f"{module}.partial", max_failed_fraction=0.25, step_trajectories=4) as scorer:
        for _ in range(5):
            assert score(scorer, [trajectory(text) for text in "xaaa"]) == [0, 1, 1, 1]
        assert scorer.metrics == {
            "reward/failed_timeout": 0.0,
            "reward/failed_exception": 0.0,
            "reward/failed_value": 5.0,
            "reward/failed_died": 0.0,
            "reward/failed_fraction": 0.25,
            "reward/retried": 0.0,
        }


def test_a_short_step_is_checked_at_its_end(custom_reward, trajectory):
    module = custom_reward("def broken(trajectories):\n    return None\n")
    with running_scorer(_target_=f"{module}.broken", step_trajectories=1000) as scorer:
        score(scorer, [trajectory("a")] * 2)
        with pytest.raises(RunError, match=r"failed on 2 of 2 trajectories"):
            scorer.check()


def test_a_fraction_of_zero_allows_none_and_of_one_all(custom_reward, trajectory):
    module = custom_reward("def broken(trajectories):\n    return None\n")
    with running_scorer(_target_=f"{module}.broken", max_failed_fraction=0.0) as scorer, pytest.raises(RunError):
        score(scorer, [trajectory("a")])
    with running_scorer(_target_=f"{module}.broken", max_failed_fraction=1.0, step_trajectories=2) as scorer:
        score(scorer, [trajectory("a")] * 6)
        scorer.check()


def test_every_failure_kind_has_a_metric():
    with running_scorer(components={"exact": 1.0}) as scorer:
        by_kind = {f"reward/failed_{kind.name}" for kind in FailureKind}
        assert set(scorer.metrics) == {*by_kind, "reward/failed_fraction", "reward/retried"}

import pytest

from app.errors import RunError
from app.reward import reward_pool
from app.reward.outcome import FailureKind
from tests.reward.scorers import WriteReward, running_scorer, score, trajectory


def test_too_many_failures_in_a_step_end_the_run_and_the_error_shows_the_last(custom_reward: WriteReward) -> None:
    module = custom_reward("def broken(trajectories):\n    raise KeyError('score')\n")
    with running_scorer(_target_=f"{module}.broken", max_failed_fraction=0.25, step_trajectories=16) as scorer:
        assert score(scorer, [trajectory("a")] * 4) == [0, 0, 0, 0]
        with pytest.raises(RunError) as caught:
            score(scorer, [trajectory("a")])
    message = str(caught.value)
    assert message.startswith(
        "5 of 5 trajectories failed, more than reward.max_failed_fraction=0.25 of a step's 16 allows; "
        "the last: component broken, exception: KeyError: 'score' at "
    )
    assert message.endswith(f"{module}.py:2.")


def test_the_first_failure_of_a_component_is_a_warning_and_then_the_10th_and_100th(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "def touchy(trajectory):\n    if trajectory.text == 'x':\n        raise KeyError('score')\n    return 1\n"
    )
    warned: list[str] = []
    with running_scorer(_target_=f"{module}.touchy", step_trajectories=1000, warned=warned) as scorer:
        score(scorer, [trajectory(text) for text in "axxa"])
        (first,) = warned
        assert first.startswith("reward component touchy failed: exception: KeyError: 'score' at ")
        assert first.endswith(
            f"{module}.py:3. A failed trajectory scores 0; above reward.max_failed_fraction=0.2 of a step the run "
            "stops. All failures are in logs/reward.log."
        )
        score(scorer, [trajectory(text) for text in "x" * 98 + "a" * 898])
    assert [text.partition(":")[0] for text in warned[1:]] == [
        "reward component touchy failed (10 times so far)",
        "reward component touchy failed (100 times so far)",
    ]


def test_each_component_has_a_first_warning(custom_reward: WriteReward) -> None:
    module = custom_reward("def one(trajectory):\n    return []\ndef two(trajectory):\n    return 'x'\n")
    components = {name: {"_target_": f"{module}.{name}"} for name in ("one", "two")}
    warned: list[str] = []
    with running_scorer(components=components, max_failed_fraction=1.0, warned=warned) as scorer:
        score(scorer, [trajectory("a")] * 3)
    assert sorted(text.partition(". ")[0] for text in warned) == [
        "reward component one failed: value: returned '[]', a list, not a number",
        "reward component two failed: value: returned 'x', a str, not a number",
    ]


def test_a_call_that_is_slow_or_repeated_is_a_warning_before_anything_has_failed_for_good(
    custom_reward: WriteReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_pool, "SLOW_WARNING_S", 0.1)
    module = custom_reward("import time\ndef sleepy(trajectories):\n    time.sleep(1000)\n")
    warned: list[str] = []
    with running_scorer(_target_=f"{module}.sleepy", timeout_s=0.25, max_failed_fraction=1.0, warned=warned) as scorer:
        score(scorer, [trajectory("a")] * 2)
    assert warned[0] == (
        "reward component sleepy has no result for 2 trajectories after 0.1 s; it has 0.5 s (reward.timeout_s). "
        "reward.workers processes score as many groups at a time."
    )
    assert warned[1].startswith(
        "reward component sleepy failed on a call for 2 trajectories (timeout: no result for 2 "
    )
    assert warned[1].endswith("see reward.timeout_s); each of them is scored again, alone.")
    assert warned[2].startswith("reward component sleepy failed: timeout: no result for 1 completion(s) within 0.25 s")
    assert len(warned) == 3


def test_the_allowed_number_of_failures_in_every_step_never_ends_the_run(custom_reward: WriteReward) -> None:
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


def test_a_short_step_is_checked_at_its_end(custom_reward: WriteReward) -> None:
    module = custom_reward("def broken(trajectories):\n    return None\n")
    with running_scorer(_target_=f"{module}.broken", step_trajectories=1000) as scorer:
        score(scorer, [trajectory("a")] * 2)
        with pytest.raises(RunError, match=r"2 of 2 trajectories failed"):
            scorer.check()


def test_a_fraction_of_zero_allows_none_and_of_one_all(custom_reward: WriteReward) -> None:
    module = custom_reward("def broken(trajectories):\n    return None\n")
    with running_scorer(_target_=f"{module}.broken", max_failed_fraction=0.0) as scorer, pytest.raises(RunError):
        score(scorer, [trajectory("a")])
    with running_scorer(_target_=f"{module}.broken", max_failed_fraction=1.0, step_trajectories=2) as scorer:
        score(scorer, [trajectory("a")] * 6)
        scorer.check()


def test_every_failure_kind_has_a_metric() -> None:
    with running_scorer(components={"exact": 1.0}) as scorer:
        by_kind = {f"reward/failed_{kind.name}" for kind in FailureKind}
        assert set(scorer.metrics) == {*by_kind, "reward/failed_fraction", "reward/retried"}

"""Scores of custom and built-in rewards in their workers, and what becomes of calls that fail or hang."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from app.errors import RunError
from app.reward import component
from app.worker.failures import FailureWindow
from tests.refusals import refused
from tests.reward.scorers import OWN, TOWER, failed, pids, running_scorer, score, trajectory
from tests.waiting import until


def test_own_and_built_in_components_are_summed_with_weights_and_reported_without() -> None:
    components = {
        "math": {"weight": 1},
        "format": 0.25,
        "exact": -0.5,
        "brief": {"_target_": f"{OWN}.brief", "args": {"limit": 12}, "weight": 0.5},
        "polite": {"_target_": f"{OWN}.polite", "weight": 0},
    }
    with running_scorer(components=components) as scorer:
        assert scorer.scored([]) == []
        scored = scorer.scored([trajectory(text) for text in ("\\boxed{42}", "please, \\boxed{42}", "42")])
        assert failed(scorer) == {}
    assert [each.reward for each in scored] == [1.75, 1.25, 1.0]
    assert [*scored[1].reward_components.values()] == [1, 1, 0, 0, 1]
    assert [*scored[1].reward_components] == ["math", "format", "exact", "brief", "polite"]


def test_a_function_gets_the_trajectories_of_one_prompt_and_its_arguments_as_they_are() -> None:
    batch = [trajectory("a", prompt_id="set/1@0")] * 3 + [trajectory("b", prompt_id="set/2@0")] * 2
    with running_scorer(_target_=f"{OWN}.ranked", args={"weights": {2: (0.5, 1.0)}}) as scorer:
        assert score(scorer, batch) == [0, 0.5, 1, 0, 0.5]


def test_a_class_is_instantiated_once_and_judges_a_group_concurrently_on_one_event_loop(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "reward.log"  # the folder is created
    with running_scorer(_target_=f"{OWN}.Judge", args={"size": 4}, timeout_s=60.0, log=log) as scorer:
        assert score(scorer, [trajectory(text) for text in ("a", "b", "bad", "c")]) == [0.5, 0.5, 0, 0.5]
        (scored,) = scorer.scored([trajectory("d")])
        assert failed(scorer) == {"exception": 1}
        assert scorer.metrics["reward/retried"] == 0
    counts = {"Judge/arrived": 5, "Judge/loops": 1, "Judge/heavy": 0}
    assert scored.reward_components == {"Judge": 0.5, **counts}

    text = log.read_text()
    assert [text.count(f"judged {each}\n") for each in ("a", "b", "bad", "c", "d")] == [1] * 5
    assert "Traceback (most recent call last)" in text
    assert "Judge failed on set/0@0, 4 trajectories: exception: ConnectionError: refused at " in text


# Calls that fail


def test_only_the_offending_trajectory_of_a_call_fails_and_the_retries_are_counted() -> None:
    kinds = {"raise": "exception", "hang": "timeout", "die": "died", "nan": "value"}
    batch = [trajectory(text, prompt_id=f"set/{name}@0") for name in kinds for text in (name, "b")]
    with running_scorer(_target_=f"{OWN}.touchy", timeout_s=1.0) as scorer:
        assert score(scorer, batch) == [0, 1] * 4
        assert failed(scorer) == dict.fromkeys(kinds.values(), 1)
        assert scorer.metrics == {
            "reward/failed_timeout": 1.0,
            "reward/failed_exception": 1.0,
            "reward/failed_value": 1.0,
            "reward/failed_died": 1.0,
            "reward/failed_fraction": 0.5,
            "reward/retried": 6.0,
        }


def test_a_call_for_several_trajectories_has_the_sum_of_their_deadlines(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    with running_scorer(_target_=f"{OWN}.slow", args={"calls": str(calls)}, timeout_s=0.5) as scorer:
        assert score(scorer, [trajectory("42")] * 64) == [1.0] * 64
        assert failed(scorer) == {}
        assert scorer.metrics["reward/retried"] == 0
    assert calls.read_text() == "64 "


def test_an_answer_that_takes_too_long_scores_zero_keeps_other_values_and_its_worker_is_replaced() -> None:
    components = {"math": 1.0, "format": 0.5, "works": {"_target_": f"{OWN}.works"}}
    with running_scorer(components=components, timeout_s=1.0) as scorer:
        assert score(scorer, [trajectory("\\boxed{42}")]) == [2.5]
        before, other = pids(scorer)
        (late,) = scorer.scored([trajectory(TOWER)])
        assert (late.reward, late.reward_components) == (0.0, {"math": 0.0, "format": 1.0, "works": 1.0})

        until(lambda: not os.path.exists(f"/proc/{before}"), 60.0)
        assert score(scorer, [trajectory("\\boxed{42}"), trajectory("7")]) == [2.5, 1.0]
        assert failed(scorer) == {"timeout": 1}
        assert other in pids(scorer)


def test_unreadable_answers_score_zero_without_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component, "BUILT_IN_TIMEOUT_S", 20.0)
    texts = ["\\boxed{" * 500, "(" * 5000, "$" * 5000, "1," * 5000, "9" * 20000, "\\frac{" * 500]
    with running_scorer(components={"math": 1.0}, timeout_s=20.0) as scorer:
        assert score(scorer, list(map(trajectory, texts))) == [0] * len(texts)
        assert failed(scorer) == {}


def test_a_module_that_ends_its_worker_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    reason = "could not start: the worker process died (exit code 1)"
    with refused("reward._target_", "ending.reward", reason), running_scorer(_target_="ending.reward"):
        pass


def test_too_many_failures_end_the_run_in_a_full_step_and_at_the_end_of_a_short_one() -> None:
    with running_scorer(_target_=f"{OWN}.raises", max_failed_fraction=0.25, step_trajectories=16) as scorer:
        assert score(scorer, [trajectory("a")] * 4) == [0, 0, 0, 0]
        with pytest.raises(RunError, match="4 of 4 trajectories failed"):
            scorer.check()
        with pytest.raises(RunError) as caught:
            score(scorer, [trajectory("a")])
    message = str(caught.value)
    assert message.startswith("5 of 5 trajectories failed, more than reward.max_failed_fraction=0.25 of a step's 16 ")
    assert "the last: component raises, exception: KeyError: 'score' at " in message
    assert "broken.py:" in message


def test_a_few_failures_after_a_full_window_are_compared_with_a_step() -> None:
    window = FailureWindow("trajectories failed", "reward.max_failed_fraction", 0.2, 256, "", lambda text: None)
    for number in range(264):
        window.count("late" if number >= 262 else None)
    window.end_window()  # 2 of the last 8
    for number in range(8):
        window.count("late" if number >= 6 else None)
    with pytest.raises(RunError, match="2 of 8 trajectories failed"):
        window.end_window()  # of a step that had no more


# Workers that die, freeze, or are closed


def test_a_worker_that_dies_is_named_with_its_exit_status_and_log_and_replaced_also_while_it_loads(
    tmp_path: Path,
) -> None:
    log, warned = tmp_path / "reward.log", list[str]()
    with running_scorer(_target_=f"{OWN}.touchy", log=log, warned=warned) as scorer:
        assert score(scorer, [trajectory("die")]) == [0]
        assert f"died: the worker process died (exit code 3); log: {log}" in warned[0]

        while not pids(scorer):
            scorer.runner.run(asyncio.sleep(0.01))  # its successor starts
        os.kill(pids(scorer)[0], signal.SIGKILL)
        assert score(scorer, [trajectory("a")]) == [1.0]
        assert failed(scorer) == {"died": 1}


def test_a_frozen_worker_that_reads_nothing_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    log, warned = tmp_path / "reward.log", list[str]()
    with running_scorer(_target_=f"{OWN}.works", timeout_s=1.0, log=log, warned=warned) as scorer:
        (frozen,) = pids(scorer)
        os.kill(frozen, signal.SIGSTOP)
        assert score(scorer, [trajectory("a" * 2**23)]) == [0]  # more than the pipe holds
        assert "timeout: no result for 1 completion(s) within 1 s, see reward.timeout_s" in warned[0]

        assert score(scorer, [trajectory("a")]) == [1.0]
        assert "works is replaced: no result for" in log.read_text()
        assert log.stat().st_mode & 0o111 == 0  # nobody runs a log
        assert not os.path.exists(f"/proc/{frozen}")


def test_a_trajectory_whose_worker_is_killed_keeps_its_reward(tmp_path: Path) -> None:
    with running_scorer(_target_=f"{OWN}.killed_once") as scorer:
        assert score(scorer, [trajectory(str(tmp_path / "mark"))]) == [1.0]
        assert failed(scorer) == {}
        assert scorer.metrics["reward/retried"] == 1


def test_a_call_goes_on_when_its_caller_is_cancelled_and_ends_at_its_deadline() -> None:
    with running_scorer(_target_=f"{OWN}.touchy", timeout_s=0.5) as scorer:

        async def cancelled() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scorer.score([trajectory("hang")]), 0.1)

        scorer.runner.run(cancelled())
        assert score(scorer, [trajectory("a")]) == [1.0]  # on the worker that took its place


def test_closing_stops_every_worker_and_every_call_in_flight() -> None:
    with running_scorer(_target_=f"{OWN}.hangs", timeout_s=100.0, workers=2) as scorer:
        workers = pids(scorer)

        async def close_while_scoring() -> list[float]:
            scoring = asyncio.create_task(scorer.score([trajectory("a")]))
            await asyncio.sleep(0.3)
            scorer.close()
            return [scored.reward for scored in await asyncio.wait_for(scoring, 50)]

        assert scorer.runner.run(close_while_scoring()) == [0]
        assert len(workers) == 2
        assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)

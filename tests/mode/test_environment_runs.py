"""Runs with an environment of their own, end to end, as a user starts them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.folders import json_lines, warnings
from tests.mode.talk import Diary
from tests.recovery.test_recovery_runs import PLACEMENTS, PROBLEMS, assert_ledger, saved_on_sigterm
from tests.runs import Run
from tests.waiting import until

GROUP = 4
SMALL = (
    "environment._target_=tests.mode.talk.Talk reward=environment rollout.max_completion_tokens=64 "
    f"algorithm.prompts_per_step=8 algorithm.group_size={GROUP} eval.before_train=false "
    "data.arithmetic.eval_problems=10"
).split()
LONG = [*SMALL, "resume=auto", "checkpoint.every=2", f"data.arithmetic.problems={PROBLEMS}"]
BOTH = pytest.mark.parametrize("placement", list(PLACEMENTS))


def talk(folder: Path, **args: Any) -> list[str]:
    """Overrides: the arguments of the environment."""
    return [f"+environment.args.{name}={value}" for name, value in {"folder": folder, **args}.items()]


def steps_of(run: Run) -> list[dict[str, Any]]:
    return [line for line in run.metrics() if "time/step" in line]


def hold_second_turns(run: Run, folder: Path, episodes: int) -> None:
    """Until so many episodes are between their first and second turn; then let them ask."""
    (folder / "go").unlink(missing_ok=True)
    (folder / "hold").touch()
    before = len(Diary(folder).lines("held"))
    until(lambda: run.process.poll() is not None or len(Diary(folder).lines("held")) >= before + episodes, 120)
    assert run.process.poll() is None, run.text
    (folder / "hold").unlink()
    (folder / "go").touch()


def test_a_run_leaves_failed_episodes_out_and_trains_on_what_engines_saw(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """One in 20 fails, and is not played again."""
    run = start("steps=3", *SMALL, *talk(tmp_path, fails_every=20), "environment.retries=0")
    assert run.wait() == 0, run.text
    assert run.gone_within(15), run.processes()
    Diary(tmp_path).assert_closed_once()

    steps = steps_of(run)
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["mismatch/abs_difference"] < 1e-4
        assert line["ratio/max"] == pytest.approx(1.0, abs=1e-4)
        assert line["staleness/max"] == 0
        assert line["rollout/cached_fraction"] > 0.2
        assert 2 <= line["environment/turns_mean"] <= 4
    failed = steps[-1]["environment/failed_episodes"]
    assert 3 <= failed == steps[-1]["environment/failed_raised"] <= 6
    assert warnings(run.folder)[-1].startswith("an episode failed: step raised RuntimeError"), warnings(run.folder)
    samples = [sample for step in (1, 2, 3) for sample in json_lines(run.folder / "samples" / f"step_{step}.jsonl")]
    assert all(len(sample["turns"]) >= 4 for sample in samples)


def assert_began_once(folder: Path, run: Run) -> None:
    """The members of what was trained on began once each, or once more for each time that their group was aborted."""
    begun = Diary(folder).begun()
    counts = [begun[prompt] for row in json_lines(run.folder / "prompts.jsonl") for prompt in row["trained"]]
    assert {count % GROUP for count in counts} == {0}
    assert counts.count(GROUP) > 0.8 * len(counts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@BOTH
def test_engine_and_trainer_that_are_killed_in_second_turns_cost_no_environment(
    placement: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    """A trainer that is lost ends all episodes, which are closed; then SIGTERM does."""
    overrides = [*LONG, *talk(tmp_path), *PLACEMENTS[placement]]
    run = start("steps=500", *overrides)
    run.wait_for_step(2)
    for _ in range(2):
        hold_second_turns(run, tmp_path, 8)
        time.sleep(0.05)
        os.kill(run.pid_of("app.rollout.engine.entry"), signal.SIGKILL)
        run.wait_for_step(run.metrics()[-1]["step"] + 2)
    assert steps_of(run)[-1]["recovery/engine_restarts"] == 2
    assert_began_once(tmp_path, run)

    hold_second_turns(run, tmp_path, 8)
    os.kill(run.pid_of("TrainerRank"), signal.SIGKILL)
    reached = run.metrics()[-1]["step"]
    run.wait_for_step(reached + 2)
    assert "restarted from step" in " ".join(warnings(run.folder))

    hold_second_turns(run, tmp_path, 8)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(60) == 130, run.text
    assert run.gone_within(15), run.processes()
    assert_ledger(run.folder, saved_on_sigterm(run))
    Diary(tmp_path).assert_closed_once()
    steps = steps_of(run)
    assert not any("environment/failed" in name and value for name, value in steps[-1].items())
    assert max(line["mismatch/abs_difference"] for line in steps if line["staleness/max"] == 0) < 1e-4

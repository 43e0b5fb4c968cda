"""Whatever is killed in a real run, nothing is lost and nothing is trained on twice."""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.checkpoint.folder import best
from app.checkpoint.run_state import read_state
from app.data.cursor import PromptCursor
from app.types import Prompt
from tests.folders import json_lines, warnings
from tests.runs import Run

PLACEMENTS = {
    "colocate": ["placement=colocate"],
    "partial": ["placement=colocate", "placement.max_staleness=2"],
    "fully_async": ["placement=fully_async", "placement.max_staleness=2", "placement.in_flight=retract"],
}
BOTH = pytest.mark.parametrize("placement", ["colocate", "fully_async"])
PARTS = {  # a part of the command line of each
    "rank": "TrainerRank",
    "engine": "app.rollout.engine.entry",
    "scheduler": "sglang::scheduler",
    "environment worker": "app.environment.worker.handler",
    "reward worker": "app.reward.handler",
}
PROBLEMS = 2000  # an epoch
LONG = [
    "resume=auto",
    "checkpoint.every=2",
    "eval.before_train=false",
    f"data.arithmetic.problems={PROBLEMS}",
    "data.arithmetic.eval_problems=20",
]


def assert_ledger(folder: Path, steps: int) -> None:
    """Every prompt that was drawn was trained on once, or filtered, or is still to come; steps follow each other.

    Of what a resumed run would keep: the steps up to its last checkpoint, which is of step `steps`.
    """
    assert state(folder)["step"] == steps
    rows = json_lines(folder / "prompts.jsonl")[:steps]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    done = Counter(prompt for row in rows for prompt in row["trained"] + row["filtered"])
    assert done.most_common(1)[0][1] == 1
    cursor = state(folder)["extra"]["cursor"]
    assert not set(cursor["returned"]) & set(done)
    drawn = cursor["epoch"] * PROBLEMS + cursor["position"]
    assert sorted(first_prompts(drawn, next(iter(done)))) == sorted([*done, *cursor["returned"]])
    steps_logged = [line["step"] for line in json_lines(folder / "metrics.jsonl") if "time/step" in line]
    assert steps_logged[:steps] == list(range(1, steps + 1))


def first_prompts(count: int, one: str) -> list[str]:
    """Return the ids of the first prompts of a run of seed 0 whose data set has the prompt `one`."""
    name = one.partition("/")[0]
    prompts = [Prompt(f"{name}/{row}", np.zeros(1, np.int32), "", name) for row in range(PROBLEMS)]
    return [prompt.id for prompt in PromptCursor(prompts, seed=0, shuffle=True).take(count)]


def state(folder: Path) -> dict[str, Any]:
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    return json.loads((folder / "checkpoints" / latest / "state.json").read_text())


def kill(run: Run, what: str) -> None:
    """One of the run's parts, as the kernel or a fault would."""
    if what == "driver":
        names = " ".join(run.processes().values())
        for part in ("app.rollout.engine.entry", "sglang::", "raylet", "gcs_server", "TrainerRank", "EngineHost"):
            assert part in names
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(10)
        assert run.gone_within(15), run.processes()
    elif what == "stalled engine":
        os.kill(run.pid_of("sglang::scheduler"), signal.SIGSTOP)
    else:
        os.kill(run.pid_of(PARTS[what]), signal.SIGKILL)


@pytest.mark.timeout(400)
def test_a_run_survives_kill_9_of_driver_engine_and_trainer(start: Callable[..., Run]) -> None:
    """One after the other; kill -9 of the driver also leaves no process behind."""
    overrides = [*PLACEMENTS["fully_async"], *LONG, "eval.every=4", "tracking.samples_per_step=1000"]
    run = start("steps=500", *overrides)
    run.wait_for_step(3)
    kill(run, "driver")
    assert run.summary()["status"] == "running"  # nobody could say otherwise
    saved, reached = state(run.folder)["step"], run.metrics()[-1]["step"]
    run = start("steps=24", *overrides)
    run.wait_for_step(reached + 2)  # the lines of the life before stand there until it is resumed
    kill(run, "engine")
    run.wait_for_step(run.metrics()[-1]["step"] + 2)
    kill(run, "rank")
    assert run.wait(200) == 0, run.text
    assert run.gone_within(15), run.processes()
    assert_ledger(run.folder, 24)
    steps = run.metrics()
    assert max(line["staleness/max"] for line in steps) <= 2
    on_policy = [line for line in steps if line["staleness/max"] == 0]
    assert len(on_policy) >= 3  # each life begins with one
    assert max(line["mismatch/kl"] for line in on_policy) < 1e-6
    assert run.summary()["status"] == "finished"
    assert_evaluated(run, range(4, 25, 4))
    assert f"resumed after step {saved}" in run.text
    said = " ".join(warnings(run.folder))
    assert "was killed by SIGKILL" in said
    assert "restarted from step" in said
    assert "Traceback" not in run.text


def assert_evaluated(run: Run, steps: Iterable[int]) -> None:
    """Each of these versions was evaluated, by itself alone; the best one's checkpoint stands."""
    accuracies = {line["step"]: line["eval/accuracy"] for line in run.metrics() if "eval/accuracy" in line}
    assert list(accuracies) == list(steps)
    for step in steps:
        lines = json_lines(run.folder / "samples" / f"eval_{step}.jsonl")
        spans = [span for line in lines for span in line["versions"]]
        assert (len(lines), {version for version, *_ in spans}) == (20, {step})
    kept = best(run.folder)
    assert kept is not None
    step = max(accuracies, key=accuracies.__getitem__)
    assert (kept.name, read_state(kept).accuracy) == (f"step_{step}", accuracies[step])


def saved_on_sigterm(run: Run) -> int:
    """The step of the newest checkpoint, which is the last one."""
    saved: int = state(run.folder)["step"]
    assert saved == run.metrics()[-1]["step"], run.text
    return saved


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("placement", "ranks", "then"), [("colocate", 1, 2), ("fully_async", 2, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(
    placement: str, ranks: int, then: int, start: Callable[..., Run]
) -> None:
    number = {"colocate": "placement.devices", "fully_async": "placement.trainer_devices"}[placement]
    overrides = [*PLACEMENTS[placement], *LONG]
    first = start(f"{number}={ranks}", "steps=4", *overrides)
    assert first.wait(400) == 0, first.text
    second = start(f"{number}={then}", "steps=8", *overrides)
    assert second.wait(400) == 0, second.text
    assert_ledger(second.folder, 8)
    on_policy = [line["mismatch/kl"] for line in second.metrics() if line["staleness/max"] == 0]
    assert len(on_policy) >= 2
    assert max(on_policy) < 1e-6

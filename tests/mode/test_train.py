"""The application end to end, with the real parts, as a user starts it."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.folders import content, json_lines, run_new_app
from tests.runs import Run
from tests.tracking.wandb_file import recorded

ALWAYS = (
    "step policy_version reward/mean reward/accuracy loss/policy grad_norm lr entropy staleness/mean staleness/max "
    "mismatch/kl tokens/completion time/step time/generate time/train time/sync throughput/completion_tokens_per_second"
)
QUICK = ["eval.before_train=false", "data.arithmetic.eval_problems=20"]


EVALUATED = [
    "steps=2",
    "checkpoint.keep=2",  # the default, which the tests' runs do not have
    "trainer.lr=2e-3",
    "trainer.warmup_steps=0",
    "data.arithmetic.eval_problems=40",
    "tracking.samples_per_step=100",  # all of them: which ones are chosen depends on the order of their completion
]


@pytest.mark.timeout(600)
def test_a_colocate_run_leaves_what_it_promises_and_its_checkpoint_evaluates_as_it_did(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("tracking=wandb", "tracking.offline=true", *EVALUATED)
    run.wait_for_step(1)
    loaded = Path(f"/proc/{run.process.pid}/maps").read_text()
    assert "libtorch" not in loaded or run.metrics()[-1]["step"] == 2  # the driver needs it for the export alone
    assert run.wait() == 0, run.text
    assert run.gone_within(15), run.processes()
    starting = re.findall(r"^ +(?:\d+ min )?\d+ s  (.+)$", run.text, re.M)
    assert starting[:2] == ["starting Ray", "starting 1 engine and 1 trainer rank"]
    assert {"1 engine: importing SGLang", "1 engine ready", "trainer ready"} <= set(starting)

    steps = [line for line in run.metrics() if "time/step" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert set(ALWAYS.split()) <= set(line)
        assert line["policy_version"] == line["step"]
        assert line["mismatch/kl"] < 1e-6
        assert line["mismatch/abs_difference"] < 1e-4
        assert line["ratio/max"] == pytest.approx(1.0)
        assert line["staleness/max"] == 0
        assert line["time/generate"] + line["time/train"] + line["time/sync"] == pytest.approx(line["time/step"])
        assert line["sync/bytes"] > 100_000
    summary = run.summary()
    assert (summary["status"], summary["steps"], summary["checkpoint/best_step"]) == ("finished", 2, 2)
    assert json_lines(run.folder / "samples" / "step_2.jsonl")[0]["reward"] in (0.0, 1.0)
    for file in ("logs/driver.log", "logs/engine_0.log", "logs/trainer_0.log", "report.html"):
        assert (run.folder / file).exists()
    assert not (run.folder / "logs" / "warnings.jsonl").exists()  # the default run has nothing to warn of

    (wandb,) = recorded(run.folder)
    assert wandb.column("reward/mean") == {line["step"]: round(line["reward/mean"], 6) for line in steps}
    accuracies = {0: summary["eval/accuracy_first"], 2: summary["eval/accuracy_last"]}
    assert wandb.column("eval/accuracy") == {step: round(accuracy, 6) for step, accuracy in accuracies.items()}
    assert wandb.exit_codes == [0]

    assert f"  model    {run.folder / 'export'}\n" in run.text
    assert f"  evaluate python -m app mode=eval resume={run.folder}\n" in run.text
    assert (run.folder / "export" / "model.safetensors").is_file()
    evaluates_as_it_did(run, tmp_path)


def evaluates_as_it_did(run: Run, cwd: Path) -> None:
    """Assert that `mode=eval` of the run's best checkpoint samples what the run did, and leaves its folder alone."""
    before = content(run.folder)
    initial, trained = (completions(run.folder / "samples" / f"eval_{step}.jsonl") for step in (0, 2))
    assert initial != trained  # the two steps changed what the model answers

    code, text = run_new_app("mode=eval", f"resume={run.folder}/checkpoints/best", cwd=cwd)
    assert code == 0, text
    assert content(run.folder) == before
    checkpoint = run.folder / "checkpoints" / "step_2"
    assert f"evaluating step 2: {checkpoint}" in text

    (folder,) = (cwd / "outputs" / "tiny-eval").iterdir()
    assert completions(folder / "samples" / "eval_2.jsonl") == trained
    (row,) = json_lines(folder / "metrics.jsonl")
    last = run.metrics()[-1]
    assert row == {name: last[name] for name in ("step", *(name for name in last if name.startswith("eval/")))}

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert (summary["evaluated/checkpoint"], summary["evaluated/step"]) == (str(checkpoint), 2)
    assert not list(folder.glob("model*"))
    assert not list(folder.rglob("*.safetensors"))


def completions(file: Path) -> dict[str, list[int]]:
    """Prompt id → tokens of the completion."""
    return {row["prompt"]: row["tokens"] for row in json_lines(file)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "placement", [["colocate"], ["fully_async", "placement.max_staleness=0", "placement.in_flight=drain"]]
)
def test_the_second_model_family_is_generated_trained_and_pushed(
    placement: list[str], start: Callable[..., Run]
) -> None:
    """colocate pushes by handle, fully_async over a process group; each push is compared with the export."""
    first, *rest = placement
    run = start("model=tiny_qwen35", f"placement={first}", *rest, "steps=3", "weight_sync.verify=always", *QUICK)
    assert run.wait(600) == 0, run.text
    assert run.gone_within(15), run.processes()
    steps = [line for line in run.metrics() if "time/step" in line]
    assert [line["policy_version"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["mismatch/abs_difference"] < 1e-4
        assert line["grad_norm"] > 0
        assert line["sync/bytes"] > 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "limit", "named"),
    [
        ("app.rollout.engine.entry", "recovery.max_engine_failures=0", "engine 0"),
        ("TrainerRank", "recovery.max_restarts=0", "trainer rank 0 died"),
    ],
    ids=["engine", "rank"],
)
def test_a_killed_part_ends_the_run_with_its_name(part: str, limit: str, named: str, start: Callable[..., Run]) -> None:
    run = start("steps=500", limit, *QUICK)
    run.wait_for_step(1)
    os.kill(run.pid_of(part), signal.SIGKILL)
    assert run.wait(60) == 1
    assert run.gone_within(15), run.processes()
    assert named in run.last_lines
    assert part == "TrainerRank" or {"SIGKILL", "engine_0.log"} <= set(re.findall(r"[\w.]+", run.text))
    assert "Traceback" not in run.text
    assert run.summary()["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_leaves_nothing(start: Callable[..., Run], number: signal.Signals) -> None:
    run = start("steps=500", *QUICK)
    run.wait_for_step(1)
    os.kill(run.process.pid, number)
    assert run.wait(30) == 130
    assert run.gone_within(15), run.processes()
    assert run.summary()["status"] == "interrupted"
    assert f"interrupted by {number.name}" in run.last_lines


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(start: Callable[..., Run], seed: int) -> None:
    run = start(f"seed={seed}")
    assert run.wait(800) == 0, run.text
    summary = run.summary()
    assert summary["eval/accuracy_first"] < 0.5
    assert summary["eval/accuracy_last"] >= 0.9
    steps = [line for line in run.metrics() if "time/step" in line]
    assert max(line["mismatch/kl"] for line in steps) < 1e-6
    assert float(np.median([line["time/step"] for line in steps])) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "devices",
    [
        ["placement=colocate", "placement.devices=2"],
        ["placement=fully_async", "placement.rollout_devices=2"],
        [
            "placement=fully_async",
            "placement.trainer_devices=2",
            "placement.rollout_devices=2",
            "rollout.tensor_parallel=2",
        ],
    ],
    ids=["two ranks and two engines", "two engines", "two ranks and an engine of two"],
)
def test_several_devices_on_either_side(start: Callable[..., Run], devices: list[str]) -> None:
    run = start(*devices, "steps=4", "weight_sync.verify=always", *QUICK)
    assert run.wait(500) == 0, run.text
    on_policy = [line["mismatch/kl"] for line in run.metrics() if line.get("staleness/max") == 0]
    assert on_policy
    assert max(on_policy) < 1e-6
    assert run.gone_within(15), run.processes()

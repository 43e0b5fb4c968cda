"""`mode=plan` as run by a user."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from app.mode.plan import describe
from app.start.inputs import CheckStage, RunInputs
from app.start.preflight import problems
from tests.compose import composed, problems_of
from tests.folders import ROOT
from tests.refusals import refused
from tests.warm import run_warm

MISSION = ("device=npu", "placement=fully_async", "model=qwen35_9b")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["epochs=2", "data.arithmetic.problems=40"], 5),
        (["epochs=0.5", "data.arithmetic.problems=32"], 1),
        (["epochs=2", "model=hf", "model.path=me/model"], 300),  # the rows of a hub are not counted
    ],
)
def test_a_plan_counts_the_steps_of_epochs_where_rows_are_local(overrides: list[str], steps: int) -> None:
    inputs = RunInputs(composed(*overrides), CheckStage.plan)
    problems(inputs)
    assert inputs.config.steps == steps
    assert f"  {steps} steps = " in describe(inputs.config)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ([], ["433.6 GiB", "4 checkpoints of 100.1 GiB", "33.4 GiB"]),
        (
            ["checkpoint.keep=1", "checkpoint.keep_best=false", "checkpoint.export=false"],
            ["200.1 GiB", "2 checkpoints of 100.1 GiB"],
        ),
        (["checkpoint.keep=0"], ["133.4 GiB", "100.1 GiB", "33.4 GiB"]),
    ],
)
def test_a_plan_has_the_disk_that_a_run_needs(settings: list[str], sizes: list[str]) -> None:
    disk = describe(composed(*MISSION, *settings)).partition("Disk: ")[2].partition("\n\n")[0]
    assert re.findall(r"(?:\d+ checkpoints of )?\d+\.\d GiB", disk) == sizes


def test_the_plan_counts_the_rows_of_local_files(tmp_path: Path) -> None:
    assert "Data: 2,000 training rows, 200 held-out rows; 60 steps are 0.48 epochs\n" in describe(composed())
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n{broken\n' * 10)
    text = describe(composed(f"data.path={rows}", f"data.eval_path={rows}", "data.max_broken_rows=20"))
    assert "10 rows in evaluation set eval, 20 broken rows skipped; 60 steps are 96 epochs" in text
    assert "10 of the 10 questions" in text
    assert "Data: refused" in describe(composed(f"data.path={rows}"))


def test_a_mistyped_evaluation_file_is_found_beside_a_hub_data_set() -> None:
    line = ["data=gsm8k", "++data.eval_sets={mine: {path: none.jsonl}}"]
    assert list(problems_of(*line)) == ["data"]
    assert problems_of("data=gsm8k", "model=qwen3_4b") == {}


def test_a_plan_that_does_not_fit_shows_what_would() -> None:
    line = ["model=hf", "model.path=Qwen/Qwen3-4B", "device=cuda"]
    assert "To make it fit" not in describe(composed(*line))

    line.append("offload.optimizer=step")
    text = describe(composed(*line, "device.memory_gib=40", "trainer.activation_checkpointing=none"))
    assert re.search(r"^  trainer\.activation_checkpointing=all: peak [\d.]+ GiB, does not fit alone$", text, re.M)
    text = describe(composed(*line, "device.memory_gib=40"))
    assert not re.search(r"^  trainer\.activation_checkpointing", text, re.M)
    assert re.search(r"^  placement\.devices=4: peak [\d.]+ GiB, fits$", text, re.M)
    assert re.search(r"^  model=hf model\.path=Qwen/Qwen3-0\.6B: peak [\d.]+ GiB, fits$", text, re.M)

    narrow = describe(composed(*MISSION, "device.memory_gib=16", "rollout.tensor_parallel=1"))
    wider = r"^  placement\.trainer_devices=\d+ placement\.rollout_devices=\d+ rollout\.tensor_parallel="
    assert re.search(wider, narrow, re.M)


def test_a_plan_with_the_advised_settings_has_the_advised_peak() -> None:
    longer = ["rollout.max_completion_tokens=16384", "trainer.tokens_per_microbatch=18432"]
    line = ["experiment=cuda1_colocate_4b", "device.memory_gib=64", "offload.optimizer=step", *longer]
    advice = describe(composed(*line)).partition("To make it fit")[2]
    shown = re.findall(r"^  (placement\S+|\S+ trainer\S+): peak ([\d.]+) GiB, (.*)$", advice, re.M)
    assert len(shown) == 3
    for settings, peak, verdict in shown:
        changed = describe(composed(*line, *settings.split()))
        assert f": {peak} GiB of 64.00 GiB" in changed
        assert ("DOES NOT FIT" not in changed) == (verdict == "fits")


def test_the_plan_shows_the_work_under_one_deadline_and_marks_what_outlasts_it() -> None:
    text = describe(composed(*MISSION, "placement.stream=off", "trainer.timeout_s=600"))
    assert "up to 2,359,296 tokens in 1 update(s) within trainer.timeout_s=600 s" in text

    line = ["device=cuda", "model=qwen3_4b", "algorithm=dapo"]
    sizes = ["algorithm.prompts_per_step=512", "algorithm.group_size=16", "rollout.max_completion_tokens=20480"]
    assert "LONGER THAN" not in describe(composed(*line))
    assert "LONGER THAN trainer.timeout_s=1800" in describe(composed(*line, *sizes))


def test_a_plan_of_episodes_has_their_number_and_limits() -> None:
    line = ["environment._target_=my_envs.Guess", "placement=fully_async", "algorithm.prompts_per_step=16"]
    line += ["rollout.max_completion_tokens=64", "rollout.max_prompt_tokens=64", "environment.workers=2"]
    text = describe(composed(*line, "algorithm.group_size=8", "environment.episodes=32", "environment.max_turns=5"))
    for shown in ("64 episodes at once (2 × environment.episodes=32)", "48 groups × 8 = 384", "5 turns", "128 tokens"):
        assert shown in text
    assert "the others wait" in text
    assert "the others wait" not in describe(composed(*line, "environment.episodes=384"))
    assert "Episodes of" not in describe(composed(*line[1:]))


PLAN = """
import runpy, sys
sys.argv[0] = "app"
try:
    runpy.run_module("app", run_name="__main__")
finally:
    print("loaded", sorted({"torch", "ray", "sglang", "transformers", "torch_npu"} & set(sys.modules)))
"""


def test_the_missions_line_is_planned_in_seconds_without_the_heavy_libraries_and_writes_nothing(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", PLAN, "mode=plan", *MISSION]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # the machine may be busy
    assert done.stdout.endswith("loaded []\n"), done.stderr
    assert not list(tmp_path.iterdir())

    for shown in (
        "npu 7: engine 0 (tensor-parallel rank 3 of 4)",
        "32 prompts × 8 completions = 256 trajectories",
        "8,953,803,264 parameters in bfloat16: 17,907,606,528 bytes (16.68 GiB)",
        "--mem-fraction-static 0.7 --max-running-requests 512 --cuda-graph-max-bs-decode 512",
    ):
        assert shown in done.stdout


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ((*MISSION, "device.memory_gib=32"), "DOES NOT FIT: 18.24 GiB too much"),
        ((*MISSION, "device.memory_gib=16", "rollout.tensor_parallel=1"), "NO ROOM: weights take 17.53 GiB"),
        ((*MISSION, "rollout.urls=[http://127.0.0.1:30000]"), "Engines: already running"),
        (("model=hf", "model.path=a/b"), "Memory: no estimate"),
    ],
)
def test_a_plan_marks_memory_that_does_not_suffice_or_is_not_known(overrides: list[str], shown: str) -> None:
    assert shown in describe(composed(*overrides))


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 128, "num_hidden_layers": 2}')
    with refused("model.path", tmp_path, "mixture of experts"):
        describe(composed("device=cuda", "model=hf", f"model.path={tmp_path}"))


def test_a_plan_says_what_a_run_would_refuse(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n' * 4)
    line = ["model=hf", f"model.path={tmp_path}", f"data.path={rows}", "data.question=q", "reward._target_=nope.f"]
    done = run_warm("mode=plan", "algorithm=dapo", *line)
    assert done.returncode == 0, done.stderr
    listed = done.stdout.partition("A run on this machine would be refused\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == [
        f"model.path={tmp_path}",
        "data.question=q",
        "reward._target_=nope.f",
    ]


def test_a_sweep_of_plans_starts_no_run_and_leaves_nothing(tmp_path: Path) -> None:
    done = run_warm("-m", "mode=plan", "steps=1,2", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("A step\n") == 2
    assert not list(tmp_path.iterdir())

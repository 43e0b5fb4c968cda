"""`mode=plan` as run by a user."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from app.mode.plan.describe import describe
from app.start.inputs import CheckStage, RunInputs
from app.start.preflight import problems
from tests.compose import composed, problems_of
from tests.warm import run_warm

ROOT = Path(__file__).parents[2]
MISSION = ("device=npu", "placement=fully_async", "model=qwen35_9b")


@pytest.mark.parametrize(
    ("overrides", "steps", "shown"),
    [
        (["epochs=2", "data.arithmetic.problems=40"], 5, "5 steps are 2 epochs"),
        (["epochs=0.5", "data.arithmetic.problems=32"], 1, "1 step is 0.5 epochs"),
        (["epochs=2", "model=hf", "model.path=me/model"], 300, "counts the steps of epochs=2"),  # rows of a hub
    ],
)
def test_a_plan_counts_the_steps_of_epochs_where_rows_are_local(overrides: list[str], steps: int, shown: str) -> None:
    inputs = RunInputs(composed(*overrides), CheckStage.plan)
    problems(inputs)
    plan = describe(inputs.config)
    assert inputs.config.steps == steps
    assert shown in plan
    assert f"  {steps} steps = " in plan


@pytest.mark.parametrize(
    ("settings", "disk"),
    [
        (
            [],
            [
                "Disk: up to 433.6 GiB in the run's folder",
                "  4 checkpoints of 100.1 GiB (12 bytes per parameter): the newest 2, the best, one being written",
                "  the exported model: up to 33.4 GiB",
            ],
        ),
        (
            ["checkpoint.keep=1", "checkpoint.keep_best=false", "checkpoint.export=false"],
            [
                "Disk: up to 200.1 GiB in the run's folder",
                "  2 checkpoints of 100.1 GiB (12 bytes per parameter): the newest 1, one being written",
                "  no model is exported (checkpoint.export=false)",
            ],
        ),
        (
            ["checkpoint.keep=0"],
            [
                "Disk: up to 133.4 GiB in the run's folder",
                "  no checkpoint is kept (checkpoint.keep=0)",
                "  one of 100.1 GiB until the export is complete",
                "  the exported model: up to 33.4 GiB",
            ],
        ),
    ],
)
def test_a_plan_says_what_is_kept_and_the_disk_that_it_needs(settings: list[str], disk: list[str]) -> None:
    lines = describe(composed(*MISSION, *settings)).splitlines()
    first = lines.index(disk[0])
    assert lines[first : first + len(disk) + 1] == [*disk, ""]


def test_the_plan_counts_the_rows_of_local_files(tmp_path: Path) -> None:
    assert "Data: 2,000 training rows, 200 held-out rows; 60 steps are 0.48 epochs\n" in describe(composed())
    gsm8k = describe(composed(*MISSION, "data=gsm8k"))
    assert "Data: training rows of openai/gsm8k; evaluation set test: split test of openai/gsm8k; rows are" in gsm8k
    own = describe(composed(*MISSION, "data._target_=no_such.rows"))
    assert "Data: training rows of no_such.rows; evaluation set eval: held-out rows; rows are counted when" in own

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n{broken\n' * 10)
    text = describe(composed(f"data.path={rows}", f"data.eval_path={rows}", "data.max_broken_rows=20"))
    assert "10 rows in evaluation set eval, 20 broken rows skipped; 60 steps are 96 epochs\n  skipped 20 " in text
    assert "\n  10 of the 10 questions of evaluation set eval are in the training set" in text
    assert "\n  algorithm.prompts_per_step=16 exceeds the 10 training rows: each step repeats some\n" in text
    refused = describe(composed(f"data.path={rows}"))
    assert "Data: refused, as the last lines say" in refused


def test_a_mistyped_evaluation_file_is_found_beside_a_hub_data_set() -> None:
    line = ["data=gsm8k", "++data.eval_sets={mine: {path: none.jsonl}}"]
    assert list(problems_of(*line)) == ["data"]
    assert problems_of("data=gsm8k", "model=qwen3_4b") == {}


def test_a_plan_that_does_not_fit_shows_what_would() -> None:
    line = ["model=hf", "model.path=Qwen/Qwen3-4B", "device=cuda"]
    assert "To make it fit" not in describe(composed(*line))

    text = describe(composed(*line, "device.memory_gib=40", "trainer.activation_checkpointing=none"))
    assert re.search(r"^  trainer\.activation_checkpointing=all: peak [\d.]+ GiB, does not fit alone$", text, re.M)
    text = describe(composed(*line, "device.memory_gib=40"))
    assert "activation_checkpointing" not in text
    assert re.search(r"^  placement\.devices=4: peak [\d.]+ GiB, fits$", text, re.M)
    assert re.search(r"^  model=hf model\.path=Qwen/Qwen3-0\.6B: peak [\d.]+ GiB, fits$", text, re.M)


def test_what_a_plan_advises_has_the_peak_that_it_says() -> None:
    longer = ["rollout.max_completion_tokens=16384", "trainer.tokens_per_microbatch=18432"]
    line = ["experiment=cuda1_colocate_4b", "device.memory_gib=64", *longer]
    advice = describe(composed(*line)).partition("To make it fit")[2]
    shown = re.findall(r"^  (placement\S+|rollout\S+ trainer\S+): peak ([\d.]+) GiB, (.*)$", advice, re.M)
    assert len(shown) == 2
    for settings, peak, verdict in shown:
        changed = describe(composed(*line, *settings.split()))
        assert f": {peak} GiB of 64.00 GiB" in changed
        assert ("DOES NOT FIT" not in changed) == (verdict == "fits")


def test_engines_without_room_are_advised_to_be_wider() -> None:
    text = describe(composed(*MISSION, "device.memory_gib=16", "rollout.tensor_parallel=1"))
    assert re.search(
        r"^  placement\.trainer_devices=\d+ placement\.rollout_devices=\d+ rollout\.tensor_parallel=", text, re.M
    )


def test_the_plan_shows_the_work_under_one_deadline() -> None:
    text = describe(composed(*MISSION, "placement.stream=off", "trainer.timeout_s=600"))
    assert (
        "one call to the trainer computes up to 2,359,296 tokens in 1 update(s) within trainer.timeout_s=600 s" in text
    )
    streamed = describe(composed(*MISSION))
    assert "computes the groups that have arrived within trainer.timeout_s=1800 s" in streamed


def test_the_plan_marks_a_step_that_is_longer_than_its_deadline() -> None:
    line = ["device=cuda", "model=qwen3_4b", "algorithm=dapo"]
    sizes = ["algorithm.prompts_per_step=512", "algorithm.group_size=16", "rollout.max_completion_tokens=20480"]
    assert "LONGER THAN" not in describe(composed(*line))
    text = describe(composed(*line, *sizes))
    assert re.search(r"\(184,549,376 tokens\): about \d{4} s, LONGER THAN trainer\.timeout_s=1800$", text, re.M)


def test_a_plan_of_episodes_says_what_is_played_at_once_and_what_the_limits_cover() -> None:
    own = "environment._target_=my_envs.Guess"
    sizes = (
        "algorithm.prompts_per_step=16",
        "algorithm.group_size=8",
        "rollout.max_completion_tokens=64",
        "rollout.max_prompt_tokens=64",
    )
    line = (own, "placement=fully_async", *sizes)
    shown = describe(composed(*line, "environment.workers=2", "environment.episodes=32", "environment.max_turns=5"))
    first = shown.splitlines().index("Episodes of my_envs.Guess")
    assert shown.splitlines()[first + 1 : first + 6] == [
        "  2 worker processes, which may allocate 8 GiB each, beside the driver",
        "  64 episodes at once (2 × environment.episodes=32); the run keeps up to 48 groups × 8 = 384 in flight; the "
        "others wait: raise environment.episodes or environment.workers",
        "  an episode: up to 5 turns; rollout.max_completion_tokens=64 is the limit of all of them together, "
        "observations included",
        "  its longest sequence: 128 tokens",
        "",
    ]
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

    text = done.stdout
    assert "npu 7: engine 0 (tensor-parallel rank 3 of 4)" in text
    assert "32 prompts × 8 completions = 256 trajectories" in text
    assert "peak: engine device, sync" in text
    assert "linear attention trains in the kernels of fla-core;" in text
    # the size of a weight sync
    assert "8,953,803,264 parameters in bfloat16: 17,907,606,528 bytes (16.68 GiB)" in text
    assert "8 of 32 layers, 8,192 bytes per token and engine rank" in text
    assert "about 3.4 s at 0.19 s per GB" in text
    # the command line of an engine
    assert "python -m app.rollout.engine.launcher --model-path Qwen/Qwen3.5-9B --dtype bfloat16 --tp-size 4" in text
    assert "--mem-fraction-static 0.7 --max-running-requests 512 --cuda-graph-max-bs-decode 512" in text
    assert "--device npu --chunked-prefill-size 8192" in text


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ((*MISSION, "device.memory_gib=32"), "DOES NOT FIT: 18.24 GiB too much"),
        ((*MISSION, "device.memory_gib=16", "rollout.tensor_parallel=1"), "NO ROOM: weights take 17.53 GiB"),
        ((*MISSION, "rollout.urls=[http://127.0.0.1:30000]"), "Engines: already running"),
        (("model=hf", "model.path=a/b"), "Memory: no estimate, the shapes of model.path=a/b are not on this machine"),
    ],
)
def test_a_plan_says_why_memory_does_not_suffice_or_is_not_known(overrides: list[str], shown: str) -> None:
    text = describe(composed(*overrides))
    assert shown in text
    assert ("engine device" in text) == (MISSION[0] in overrides and "already running" not in shown)
    assert "A step" in text


def test_a_plan_says_what_a_run_would_refuse(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n' * 4)
    line = ["model=hf", f"model.path={tmp_path}", f"data.path={rows}", "data.question=q", "reward._target_=nope.f"]
    done = run_warm("mode=plan", "algorithm=dapo", *line)
    assert done.returncode == 0, done.stderr
    refused = done.stdout.partition("A run on this machine would be refused\n")[2].splitlines()
    assert [line.split(" is not")[0].strip() for line in refused] == [
        f"model.path={tmp_path}",
        "data.question=q",
        "reward._target_=nope.f",
    ]


def test_a_plan_loads_an_environment_in_a_worker_and_imports_no_heavy_library() -> None:
    done = run_warm("mode=plan", "environment._target_=tests.mode.own_environments.Missing")
    assert "has no Missing" in done.stdout
    assert (done.stderr, done.heavy) == ("", [])


def test_a_sweep_of_plans_starts_no_run_and_leaves_nothing(tmp_path: Path) -> None:
    done = run_warm("-m", "mode=plan", "steps=1,2", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("A step\n") == 2
    assert not list(tmp_path.iterdir())

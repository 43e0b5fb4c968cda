"""`mode=plan` as run by a user."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from app.mode.plan.describe import describe
from tests.compose import composed

ROOT = Path(__file__).parents[2]
MISSION = ("device=npu", "placement=fully_async", "model=qwen35_9b")
HEAVY = ("torch", "ray", "sglang", "transformers", "torch_npu")


def test_the_mission_plan_takes_less_than_five_seconds_and_writes_nothing(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    outputs = set((ROOT / "outputs").glob("*/*"))
    done = subprocess.run(
        [sys.executable, "-m", "app", "mode=plan", *MISSION], cwd=ROOT, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    )  # CPU seconds, since the machine may be busy
    assert "npu 7: engine 0 (tensor-parallel rank 3 of 4)" in done.stdout
    assert "peak: trainer device, backward of a layer" in done.stdout
    assert set((ROOT / "outputs").glob("*/*")) == outputs


def test_a_plan_imports_no_heavy_library() -> None:
    code = (
        "import sys; from app.mode.plan.describe import describe; from tests.compose import composed; "
        f"describe(composed(*{MISSION!r})); "
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]; sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_mission_plan_shows_the_size_of_a_weight_sync() -> None:
    text = describe(composed(*MISSION))
    assert "8,953,803,264 parameters in bfloat16: 17,907,606,528 bytes (16.68 GiB)" in text
    assert "8 of 32 layers, 8,192 bytes per token and engine rank" in text
    assert "about 3.4 s at 0.19 s per GB" in text


def test_the_plan_shows_the_real_command_line_of_an_engine() -> None:
    text = describe(composed(*MISSION))
    assert "python -m app.rollout.launcher --model-path Qwen/Qwen3.5-9B --dtype bfloat16 --tp-size 4" in text
    assert "--mem-fraction-static 0.7" in text
    assert "--device npu --chunked-prefill-size 8192" in text


def test_the_plan_reports_too_little_memory() -> None:
    text = describe(composed(*MISSION, "device.memory_gib=32"))
    assert "DOES NOT FIT: 26.79 GiB too much" in text


def test_the_plan_reports_an_engine_whose_weights_do_not_fit() -> None:
    text = describe(composed(*MISSION, "device.memory_gib=16", "rollout.tensor_parallel=1"))
    assert "NO ROOM: weights take 17.53 GiB" in text


def test_running_servers_are_excluded_from_the_memory_plan() -> None:
    text = describe(composed(*MISSION, "rollout.urls=[http://127.0.0.1:30000]"))
    assert "engine device" not in text
    assert "Engines: already running" in text


@pytest.mark.parametrize("model", ["somebody/something"])
def test_an_unknown_model_still_gets_the_rest_of_the_plan(model: str) -> None:
    text = describe(composed(f"model.path={model}"))
    assert f"Memory: model.path={model} is not a local dense decoder" in text
    assert "A step" in text


def test_the_plan_names_settings_without_effect() -> None:
    sentence = "algorithm.clip_low and algorithm.clip_high have no effect: with algorithm.updates_per_step=1"
    assert describe(composed()).count(sentence) == 1
    assert "no effect" not in describe(composed("algorithm=dapo"))


def test_the_plan_shows_the_work_under_one_deadline() -> None:
    text = describe(composed(*MISSION, "placement.stream=off", "trainer.timeout_s=600"))
    assert (
        "one call to the trainer computes up to 2,621,440 tokens in 1 update(s) within trainer.timeout_s=600 s" in text
    )
    streamed = describe(composed(*MISSION))
    assert "computes the groups that have arrived within trainer.timeout_s=1800 s" in streamed


def test_the_plan_marks_a_step_that_is_longer_than_its_deadline() -> None:
    line = ["device=cuda", "model=qwen3_4b", "algorithm=dapo"]
    sizes = ["algorithm.prompts_per_step=512", "algorithm.group_size=16", "rollout.max_completion_tokens=20480"]
    assert "LONGER THAN" not in describe(composed(*line))
    text = describe(composed(*line, *sizes))
    assert re.search(r"\(184,549,376 tokens\): about \d{4} s at .*, LONGER THAN trainer\.timeout_s=1800$", text, re.M)


def test_a_sweep_of_plans_starts_no_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app", "-m", "mode=plan", "steps=1,2", f"hydra.sweep.dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("A step\n") == 2
    assert list(tmp_path.rglob("summary.json")) == []

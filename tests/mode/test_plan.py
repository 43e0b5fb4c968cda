"""`mode=plan` as run by a user."""

import re
import resource
from pathlib import Path

import pytest

from app.mode.plan import describe
from tests.compose import composed
from tests.folders import python
from tests.refusals import refused

MISSION = ("device=npu", "placement=fully_async", "model=qwen35_9b")


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
    printed = python("-c", PLAN, "mode=plan", *MISSION, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # the machine may be busy
    assert printed.endswith("loaded []\n")
    assert not list(tmp_path.iterdir())

    for shown in (
        "npu 7: engine 0 (tensor-parallel rank 3 of 4)",
        "32 prompts × 8 completions = 256 trajectories",
        "8,953,803,264 parameters in bfloat16: 17,907,606,528 bytes (16.68 GiB)",
        "--mem-fraction-static 0.7 --max-running-requests 512 --cuda-graph-max-bs-decode 512",
    ):
        assert shown in printed


def test_a_supervised_run_that_samples_nothing_is_planned_without_engines() -> None:
    supervised = (
        "mode=sft",
        "device=cuda",
        "model=qwen3_4b",
        "placement.devices=3",
        "data.path=x.jsonl",
        "eval.every=0",
    )
    text = describe(composed(*supervised))
    assert "  cuda 2: trainer rank 2\n  0 engine(s)" in text
    assert "generate about 0 s" in text
    assert not re.search("engine (weights|device|0)|KV cache|mem-fraction", text)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 128, "num_hidden_layers": 2}')
    with refused("model.path", tmp_path, "mixture of experts"):
        describe(composed("device=cuda", "model=hf", f"model.path={tmp_path}"))

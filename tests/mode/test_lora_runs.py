"""Runs that train adapters: with every other feature that touches weights, requests or engines."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.mode.test_environment_runs import steps_of
from tests.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BOTH = pytest.mark.parametrize("placement", ["colocate", "fully_async"])
ROUNDING = 1e-5  # float32, between an engine and the trainer, mean per token

COMBINATIONS = {
    "dapo": ["algorithm=dapo", "algorithm.prompts_per_step=16", "algorithm.updates_per_step=4"],
    "reference": ["algorithm.kl=k3", "algorithm.kl_coefficient=0.05"],
    "two ranks": ["placement.devices=2", "placement.trainer_devices=2"],
    "tensor parallel": ["placement.devices=2", "placement.rollout_devices=2", "rollout.tensor_parallel=2"],
    "bfloat16": ["device.dtype=bfloat16"],
    "qwen35": ["model=tiny_qwen35", "model.name=tiny_qwen35", "model.lora.rank=8", "trainer.lr=1e-3"],
    "environment": [
        "model=tiny_tools",
        "data=products",
        "environment=calculator",
        "model.lora.rank=8",
        "trainer.lr=3e-3",
        "data.products.eval_problems=20",
    ],
    "targets": ["model.lora.targets=[q_proj,v_proj]", "model.lora.alpha=16"],
}


def assert_on_policy(run: Run, bound: float = ROUNDING) -> None:
    """What was sampled under a version is what the trainer computes for it."""
    fresh = [line["mismatch/abs_difference"] for line in steps_of(run) if line["staleness/max"] == 0]
    assert fresh
    assert max(fresh) < bound


@BOTH
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_run_with_adapters_and(combination: str, placement: str, start: Callable[..., Run]) -> None:
    run = start("model=tiny_lora", *COMBINATIONS[combination], f"placement={placement}", "steps=4")
    assert run.wait(800) == 0, run.text
    assert run.gone_within(15), run.processes()
    steps = steps_of(run)
    assert len(steps) == 4
    assert_on_policy(run, 0.05 if combination == "bfloat16" else ROUNDING)
    assert all(line["updates/relative_change"] > 0 for line in steps)
    assert all(1 <= line["lora/loaded_adapters"] <= 5 for line in steps)
    assert max(line["staleness/max"] for line in steps) <= (0 if placement == "colocate" else 2)
    # bytes of A and B of this rank, in the engines' dtype
    assert len({line["sync/bytes"] for line in steps}) == 1


@BOTH
def test_killed_engine_and_rank_cost_a_run_with_adapters_nothing_but_time(
    placement: str, start: Callable[..., Run]
) -> None:
    run = start("model=tiny_lora", f"placement={placement}", "steps=30", "checkpoint.every=2", "checkpoint.keep=2")
    run.wait_for_step(3)
    os.kill(run.pid_of("app.rollout.engine.entry"), signal.SIGKILL)
    run.wait_for_step(run.metrics()[-1]["step"] + 3)
    os.kill(run.pid_of("TrainerRank"), signal.SIGKILL)
    assert run.wait(600) == 0, run.text
    assert run.gone_within(15), run.processes()
    assert_on_policy(run)
    steps = steps_of(run)
    assert [line["step"] for line in steps] == list(range(1, 31))
    assert steps[-1]["recovery/engine_restarts"] == 1
    assert "restarted from step" in run.text
    assert run.summary()["status"] == "finished"


def test_a_resumed_run_continues_its_adapters(start: Callable[..., Run]) -> None:
    """In colocate, whose order is fixed, the same parameters as without the interruption: the same losses."""
    overrides = ["model=tiny_lora", "rollout.temperature=1.0", "eval.before_train=false"]
    run = start(*overrides, "steps=4", "checkpoint.keep=2", "checkpoint.export=false")
    assert run.wait(600) == 0, run.text
    before = steps_of(run)[-1]
    run = start(*overrides, f"resume={run.folder}", "steps=6", "checkpoint.export=true")
    assert run.wait(600) == 0, run.text
    after = steps_of(run)
    assert [line["step"] for line in after] == list(range(1, 7))
    assert after[3] == before
    assert after[4]["updates/relative_change"] > 0
    assert_on_policy(run)
    assert (run.folder / "export" / "adapter" / "adapter_model.safetensors").exists()

"""The plan's seconds: a hand calculation, and a published run beside it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.device import device_of
from app.mode.plan.duration import StepSeconds, mean_step_seconds, recomputed_tokens, step_seconds, training_seconds
from app.mode.plan.memory import plan_memory
from app.model.architecture import QWEN3_4B, QWEN35_9B, Architecture
from tests.compose import composed
from tests.folders import ROOT

COUNTS = ROOT / "tests" / "bench" / "results" / "linear_counts.json"
P = 4_022_468_096  # parameters of Qwen3-4B
KV = 36 * 2 * 8 * 128 * 2  # bytes per token: layers, keys and values, heads, width, bfloat16
FOUR_AND_FOUR = [
    "device=cuda",
    "placement=fully_async",
    "model=qwen3_4b",
    "placement.trainer_devices=4",
    "placement.rollout_devices=4",
    "rollout.tensor_parallel=1",
    "rollout.max_completion_tokens=2048",
    "trainer.activation_checkpointing=all",
    "rollout.max_inflight_groups=32",
]


def given(model: Architecture, *overrides: str) -> tuple[Any, ...]:
    """The arguments of an estimate."""
    config = composed(*overrides)
    device = device_of(config.device.kind)
    return config, device, model, plan_memory(config, device, model).engine


def seconds(
    model: Architecture, *overrides: str, estimate: Callable[..., StepSeconds | None] = step_seconds
) -> StepSeconds:
    found = estimate(*given(model, *overrides))
    assert found is not None
    return found


def test_the_seconds_are_those_of_a_hand_calculation() -> None:
    assert QWEN3_4B.parameters == P
    estimate = seconds(QWEN3_4B, *FOUR_AND_FOUR)
    prompt = composed(*FOUR_AND_FOUR).rollout.max_prompt_tokens

    # 256 completions on 4 engines, 64 at once: 2,048 decode steps, each of which reads weights and caches
    read = 2 * P + 64 * (prompt + 1024) * KV
    assert estimate.generate == pytest.approx(2048 * read / (0.5 * 3350e9), rel=1e-9)
    # forward, recomputed and backward: products of the weights, and attention over half of the sequence
    flops = 8 * P + 4 * 36 * 2 * (prompt + 2048) * 32 * 128
    assert estimate.train == pytest.approx(flops * 256 * (prompt + 2048) / (4 * 0.4 * 989e12), rel=1e-9)
    assert estimate.sync == pytest.approx(2 * P / 1e9 * 0.12, rel=1e-9)
    assert estimate.total == max(estimate.generate, estimate.train) + estimate.sync

    # the passes of a reference, and of π_old where a step has several updates
    for overrides, passes in ((["algorithm.kl=k3"], 1), (["algorithm=gspo", "algorithm.kl=k3"], 2)):
        scored = flops + passes * (2 * P + 36 * 2 * (prompt + 2048) * 32 * 128)
        train = seconds(QWEN3_4B, *FOUR_AND_FOUR, *overrides, "offload.optimizer=step").train
        assert train == pytest.approx(estimate.train * scored / flops, rel=1e-9)

    # moments of a rank, both ways in each of two updates, at 45 GB/s
    two = [*FOUR_AND_FOUR, "algorithm.updates_per_step=2"]
    with_copies, without = (seconds(QWEN3_4B, *two, f"offload.optimizer={each}").train for each in ("update", "step"))
    assert with_copies - without == pytest.approx(2 * 2 * 8 * P / 4 / 45e9, rel=1e-6)


def test_shorter_completions_need_less_but_for_the_longest_of_an_on_policy_step() -> None:
    shorter = seconds(QWEN3_4B, *FOUR_AND_FOUR, "rollout.max_completion_tokens=819")  # 0.4 of 2,048
    means = []
    for line in (FOUR_AND_FOUR, [*FOUR_AND_FOUR, "placement.max_staleness=0", "placement.in_flight=drain"]):
        config, _, _, engine = given(QWEN3_4B, *line)
        assert recomputed_tokens(config, engine) == 64 * (config.rollout.max_prompt_tokens + 1024)
        means.append(seconds(QWEN3_4B, *line, estimate=mean_step_seconds))
    asynchronous, on_policy = means
    assert (asynchronous.generate, asynchronous.train) == pytest.approx((shorter.generate, shorter.train), rel=1e-9)
    alone = (2048 - 819) * 2 * P / (0.5 * 3350e9)
    assert on_policy.generate - asynchronous.generate == pytest.approx(alone, rel=1e-9)


def test_a_published_run_is_within_a_factor_of_two() -> None:
    """Qwen3-4B, GRPO, 32 × 8 of up to 2k tokens on 4 + 4 H800: rollout 23.8 s, training 16.8 s (vime, issue 244)."""
    estimate = seconds(QWEN3_4B, *FOUR_AND_FOUR)
    assert 23.8 / 2 < estimate.generate < 2 * 23.8  # its completions are shorter than the limit
    assert 16.8 / 2 < estimate.train < 2 * 16.8


def test_phases_of_colocate_add_up_and_adapters_hardly_cost_a_sync() -> None:
    full = seconds(QWEN3_4B, "device=cuda", "model=qwen3_4b", "placement.devices=4")
    adapted = seconds(QWEN3_4B, "device=cuda", "model=qwen3_4b_lora")
    assert full.total == full.generate + full.train + full.sync
    assert adapted.sync < full.sync / 10


@pytest.mark.parametrize(("name", "sequences"), [("one sequence", 1), ("four sequences", 4), ("sixteen sequences", 16)])
def test_torchs_loop_of_linear_attention_takes_the_bytes_that_were_counted(name: str, sequences: int) -> None:
    counts = json.loads(COUNTS.read_text())["layer"]["loop"][name]
    length = ("rollout.max_prompt_tokens=256", f"rollout.max_completion_tokens={8192 // sequences - 256}")
    config = composed("device=npu", "model=qwen35_9b", "trainer.activation_checkpointing=all", *length)
    npu = device_of(config.device.kind)
    looped = training_seconds(config, replace(npu, linear_attention=None), QWEN35_9B)
    kernels = training_seconds(config, npu, QWEN35_9B)
    assert looped is not None
    assert kernels is not None

    moved = 24 * (2 * counts["forward"]["bytes"] + counts["backward"]["bytes"])  # each layer is recomputed
    microbatches = 256 / sequences / config.placement.trainer_ranks
    assert looped - kernels == pytest.approx(microbatches * moved / (0.7 * 1600e9), rel=0.05)

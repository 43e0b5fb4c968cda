"""Ranks wait little for each other: the planner on simulated lengths, by the FLOPs of the presets' models.

Lengths are lognormal within and between 32 groups of 8, with a cap and a prompt that a group shares. Efficiency is the
FLOPs of all samples over ranks × the slowest rank's, summed over passes. Streamed steps get four groups at a time.
"""

import math
from functools import cache
from statistics import mean

import numpy as np
import pytest
import torch

from app.device.torchvision_shim import transformers
from app.model.attention import PACKED, register_packed
from app.model.kernels import Kernels
from app.model.policy import PolicyModel
from app.trainer.microbatch import Passes, Workload, plan_microbatches, ready_passes
from app.trainer.throughput import Cost, ModelFlops
from tests.bench.random_model import QWEN3_4B

DRAWS, AT_A_TIME = 12, 4
STREAMED = 0.94  # efficiency
Lengths = tuple[int, int, bytes]  # tokens, sampled tokens, shared prefix


@cache
def cost_of(model: str) -> Cost:
    """FLOPs of forward and backward of a preset's policy, on meta tensors."""
    auto = transformers()
    config = auto.Qwen3Config(**QWEN3_4B) if model == "Qwen3-4B" else auto.Qwen3_5TextConfig()  # by default 9B
    register_packed()
    with torch.device("meta"):
        causal_lm = auto.AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    return ModelFlops.of(PolicyModel(causal_lm, {}, Kernels())).step


def draw(random: np.random.Generator, average: int, spread: float, cap: int) -> list[list[Lengths]]:
    groups = []
    for number in range(32):
        prompt = int(random.integers(150, 450))
        prefix = (np.arange(prompt - 1, dtype=np.int32) + number * 1000).tobytes()
        center = math.log(average) - spread**2 / 2 + random.normal(0, 0.5)
        sampled = np.clip(random.lognormal(center, spread, 8).astype(int), 16, cap)
        groups.append([(prompt + int(count), int(count), prefix) for count in sampled])
    return groups


def efficiency(groups: list[list[Lengths]], cost: Cost, ranks: int, budget: int, at_a_time: int) -> float:
    """As `TrainStep.add_groups` and `finish` compute a step."""
    useful = paid = 0.0
    pending: list[Lengths] = []

    def compute(passes: Passes, work: Workload) -> None:
        nonlocal useful, paid
        for by_rank in passes:
            costs = [work.flops(members) for members in by_rank]
            useful += sum(costs)
            paid += ranks * max(costs)

    def workload() -> Workload:
        lengths, sampled, prefixes = zip(*pending, strict=True)
        return Workload(lengths, sampled, prefixes, cost)

    for start in range(0, len(groups), at_a_time):
        pending += [each for group in groups[start : start + at_a_time] for each in group]
        if at_a_time < len(groups):
            passes, waiting = ready_passes(work := workload(), ranks=ranks, budget=budget)
            compute(passes, work)
            pending = [pending[index] for index in waiting]
    if pending:
        compute(plan_microbatches(work := workload(), ranks=ranks, budget=budget), work)
    return useful / paid


@pytest.mark.parametrize(
    ("model", "average", "spread", "cap", "budget", "whole"),
    [
        ("Qwen3-4B", 3000, 0.7, 8192, 10_240, (0.985, 0.97)),  # at 4 and at 8 ranks
        ("Qwen3.5-9B", 3000, 0.7, 7168, 8192, (0.99, 0.98)),
        ("Qwen3.5-9B", 10_000, 0.9, 32_768, 34_816, (0.985, 0.985)),
    ],
)
def test_ranks_are_busy_in_whole_and_in_streamed_steps(
    model: str, average: int, spread: float, cap: int, budget: int, whole: tuple[float, float]
) -> None:
    random = np.random.default_rng(1)
    draws = [draw(random, average, spread, cap) for _ in range(DRAWS)]
    for ranks, bound in zip((4, 8), whole, strict=True):
        found = [efficiency(groups, cost_of(model), ranks, budget, len(groups)) for groups in draws]
        assert mean(found) >= bound
        streamed = [efficiency(sorted(groups, key=max), cost_of(model), ranks, budget, AT_A_TIME) for groups in draws]
        assert mean(streamed) >= STREAMED

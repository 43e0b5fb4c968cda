"""How evenly the planner's microbatches load the ranks, on simulated lengths.

    python -m tests.bench.balance --out tests/bench/results/balance.json

Lengths are lognormal within and between groups, with a cap and a prompt that a group shares. Efficiency is the FLOPs of
all samples over ranks × the slowest rank's, summed over passes; FLOPs are those of the application's own policy on meta
tensors. `whole`: all groups are known (colocate). `streamed`: four groups at a time, shortest first.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from app.device.torchvision_shim import transformers
from app.model.attention import PACKED, register_packed
from app.model.kernels import Kernels
from app.model.policy import PolicyModel
from app.trainer.microbatch import Passes, Workload, plan_microbatches, ready_passes
from app.trainer.throughput import Cost, ModelFlops
from tests.bench.machine import Options, publish
from tests.bench.random_model import QWEN3_4B

DRAWS = 12
AT_A_TIME = 4  # groups
Lengths = tuple[int, int, bytes]  # tokens, sampled tokens, shared prefix


@dataclass(frozen=True)
class Case:
    """Groups to draw."""

    model: str
    mean: int  # sampled tokens
    spread: float  # of the logarithm, within a group
    cap: int
    budget: int
    groups: int = 32
    size: int = 8

    @property
    def name(self) -> str:
        return f"{self.model}, {self.groups} x {self.size}, cap {self.cap:,}, microbatches of {self.budget:,}"

    def draw(self, random: np.random.Generator) -> list[list[Lengths]]:
        drawn = []
        for number in range(self.groups):
            prompt = int(random.integers(150, 450))
            prefix = (np.arange(prompt - 1, dtype=np.int32) + number * 1000).tobytes()
            center = math.log(self.mean) - self.spread**2 / 2 + random.normal(0, 0.5)
            sampled = np.clip(random.lognormal(center, self.spread, self.size).astype(int), 16, self.cap)
            drawn.append([(prompt + int(count), int(count), prefix) for count in sampled])
        return drawn


CASES = (
    Case("Qwen3-4B", 3000, 0.7, 8192, 10_240),
    Case("Qwen3.5-9B", 3000, 0.7, 7168, 8192),
    Case("Qwen3.5-9B", 10_000, 0.9, 32_768, 34_816),
)


@cache
def cost_of(model: str) -> Cost:
    """FLOPs of forward and backward of a preset's policy."""
    auto = transformers()
    config = auto.Qwen3Config(**QWEN3_4B) if model == "Qwen3-4B" else auto.Qwen3_5TextConfig()  # by default 9B
    register_packed()
    with torch.device("meta"):
        causal_lm = auto.AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    return ModelFlops.of(PolicyModel(causal_lm, {}, Kernels())).step


def workload(sequences: Sequence[Lengths], cost: Cost) -> Workload:
    lengths, sampled, prefixes = zip(*sequences, strict=True)
    return Workload(lengths, sampled, prefixes, cost)


class Load:
    """FLOPs so far: of all samples, and of all ranks if each were as slow as the slowest of each pass."""

    def __init__(self, ranks: int):
        self.ranks, self.passes = ranks, 0
        self._useful = self._paid = 0.0

    def add(self, passes: Passes, work: Workload) -> None:
        for by_rank in passes:
            costs = [work.flops(members) for members in by_rank]
            self._useful += sum(costs)
            self._paid += self.ranks * max(costs)
            self.passes += 1

    @property
    def efficiency(self) -> float:
        return self._useful / self._paid


def whole(groups: Sequence[Sequence[Lengths]], cost: Cost, ranks: int, budget: int) -> Load:
    load, work = Load(ranks), workload([each for group in groups for each in group], cost)
    load.add(plan_microbatches(work, ranks=ranks, budget=budget), work)
    return load


def streamed(groups: Sequence[Sequence[Lengths]], cost: Cost, ranks: int, budget: int) -> Load:
    """As `TrainStep.add_groups` and `finish` do it."""
    load, pending = Load(ranks), list[Lengths]()
    order = sorted(groups, key=lambda group: max(group))
    for start in range(0, len(order), AT_A_TIME):
        pending += [each for group in order[start : start + AT_A_TIME] for each in group]
        work = workload(pending, cost)
        passes, waiting = ready_passes(work, ranks=ranks, budget=budget)
        load.add(passes, work)
        pending = [pending[index] for index in waiting]
    if pending:
        work = workload(pending, cost)
        load.add(plan_microbatches(work, ranks=ranks, budget=budget), work)
    return load


def efficiencies(case: Case, ranks: int) -> dict[str, float]:
    """Means over `DRAWS` draws."""
    random, cost = np.random.default_rng(1), cost_of(case.model)
    draws = [case.draw(random) for _ in range(DRAWS)]
    ways = {"whole": whole, "streamed": streamed}
    return {
        name: round(statistics.mean(way(groups, cost, ranks, case.budget).efficiency for groups in draws), 4)
        for name, way in ways.items()
    }


def planning_seconds() -> float:
    """Of 8,192 samples for 8 ranks: the median of five."""
    case = Case("Qwen3-4B", 3000, 0.7, 8192, 10_240, groups=512, size=16)
    sequences = [each for group in case.draw(np.random.default_rng(1)) for each in group]
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        plan_microbatches(workload(sequences, cost_of(case.model)), ranks=8, budget=case.budget)
        taken.append(time.perf_counter() - began)
    return round(statistics.median(taken), 3)


def main() -> None:
    given, _ = Options(__doc__).parse()
    found = {f"{case.name}, {ranks} ranks": efficiencies(case, ranks) for case in CASES for ranks in (4, 8)}
    publish({"what": "balance", "efficiency": found, "seconds_to_plan_8192": planning_seconds()}, given.out)


if __name__ == "__main__":
    main()

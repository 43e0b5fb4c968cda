"""One GRPO step of the trainer against plain transformers loops.

    python -m tests.bench.trainer [--rounds N] [--out FILE [--add]]

All train the same random Qwen3 (512 wide, 8 layers, vocabulary 151,936) on the same trajectories with long-tailed
lengths, with the same loss, AdamW, float32, recomputation, threads and at most 1,600 positions a microbatch. `ours` is
the step of a rank alone; `plain` and `naive` are described in plain_trainer.py. On AMD's CPUs `ours` computes its
products with oneDNN (app/cpu_engine/matmul.py), and so does `plain_onednn`.

Each measurement is a separate process, and the four take turns. Memory is the peak resident size during the step,
minus the size before the model was loaded and four times the parameters (parameters, gradients, AdamW's two moments).
Equal gradient norms show equal computations. The work is counted in a step of its own. `--add` adds rounds to FILE.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.types import Completion, FinishReason, Group, Prompt, ScoredGroup, Trajectory, VersionSpan
from tests.bench.machine import (
    MIB,
    Options,
    busy,
    conditions,
    machine,
    peak_rss_mib,
    publish,
    reset_peak,
    rss_mib,
    spread,
)

SHAPES: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
PROMPTS, GROUP_SIZE, PROMPT_TOKENS = 4, 8, 16
MEDIAN, SIGMA, LIMIT = 48, 1.0, 384  # completion tokens, log-normal
BUDGET = 4 * (PROMPT_TOKENS + LIMIT)  # positions of a microbatch
BASELINES = ("plain", "plain_onednn", "naive")
WAYS = (*BASELINES, "ours")
DEADLINE_SECONDS = 600  # for one measurement


def make_groups(prompts: int, seed: int) -> list[ScoredGroup]:
    random, vocabulary = np.random.default_rng(seed), SHAPES["vocab_size"]
    groups = []
    for index in range(prompts):
        prompt = Prompt(f"bench/{index}@0", tokens(random, PROMPT_TOKENS, vocabulary), "", "bench")
        lengths = np.minimum(LIMIT, random.lognormal(np.log(MEDIAN), SIGMA, GROUP_SIZE).astype(int) + 1)
        groups.append(random_group(prompt, lengths.tolist(), random, vocabulary))
    return groups


def random_group(prompt: Prompt, lengths: Sequence[int], random: np.random.Generator, vocabulary: int) -> ScoredGroup:
    """A group of random completions of these lengths, with random advantages."""
    members = tuple(trajectory(prompt, tokens(random, length, vocabulary), vocabulary) for length in lengths)
    return ScoredGroup(Group(prompt, members), random.normal(size=len(members)).astype(np.float32))


def trajectory(prompt: Prompt, completion: np.ndarray, vocabulary: int) -> Trajectory:
    logprobs = np.full(len(completion), -np.log(vocabulary), dtype=np.float32)
    spans = (VersionSpan(0, 0, len(completion)),)
    return Trajectory(prompt, Completion(completion, logprobs, FinishReason.stop, spans), "", reward=0.0)


def tokens(random: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    return random.integers(0, vocabulary, count).astype(np.int32)


# --- the implementations


@dataclass(frozen=True, slots=True)
class Trainer:
    """A loaded model."""

    step: Callable[[list[ScoredGroup]], float]  # trains one step, returns its gradient norm
    embeddings: Any  # module
    parameters: int


def ours(path: Path) -> Trainer:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from app.config.algorithm import AlgorithmConfig, Correction
    from app.config.trainer import Checkpointing, TrainerConfig
    from app.device.cpu import DEVICE
    from app.model.load import load
    from app.trainer.optimizer import PolicyOptimizer
    from app.trainer.step import StepSettings, TrainStep

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = load(path, mesh=init_device_mesh("cpu", (1,)), device="cpu", activation_checkpointing=Checkpointing.all)
    optimizer = PolicyOptimizer(policy.parameters(), TrainerConfig(), fused=DEVICE.fused_optimizer)
    settings = StepSettings(AlgorithmConfig(), Correction.none, 1.0, LIMIT, BUDGET)
    step = TrainStep(policy, optimizer, settings, torch.device("cpu"))

    def train(groups: list[ScoredGroup]) -> float:
        step.begin(1)
        step.add_groups(groups)
        return step.finish().metrics["grad_norm"]

    return Trainer(train, policy.causal_lm.get_input_embeddings(), count(policy))


def plain(path: Path, *, naive: bool) -> Trainer:
    from tests.bench.plain_trainer import PlainTrainer

    trainer = PlainTrainer(path, budget=BUDGET, naive=naive)
    return Trainer(trainer.step, trainer.model.get_input_embeddings(), count(trainer.model))


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- measurements, each in its own process


def make_trainer(way: str, path: Path) -> Trainer:
    import torch

    from app.cpu_engine.matmul import use_onednn_matmul

    torch.set_num_threads(os.cpu_count() or 1)
    if way in ("ours", "plain_onednn"):
        use_onednn_matmul()
    return ours(path) if way == "ours" else plain(path, naive=way == "naive")


def measure(way: str, path: Path) -> dict[str, float]:
    """Measure one step, after a short step that allocates all memory."""
    from app.device.torchvision_shim import transformers

    # Its import must not count as memory of the model.
    transformers().AutoModelForCausalLM  # noqa: B018
    empty = rss_mib()
    trainer = make_trainer(way, path)
    warmup = make_groups(1, seed=1)
    trainer.step(
        [ScoredGroup(Group(warmup[0].group.prompt, warmup[0].group.trajectories[:2]), warmup[0].advantages[:2])]
    )

    gc.collect()
    reset_peak()
    groups = make_groups(PROMPTS, seed=0)
    started = time.perf_counter()
    norm = trainer.step(groups)
    seconds = time.perf_counter() - started

    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens_of(groups) / seconds, 2),
        "mib_above_model": round(peak_rss_mib() - empty - 4 * 4 * trainer.parameters / MIB),
        "grad_norm": round(norm, 3),
    }


def count_work(way: str, path: Path) -> dict[str, float]:
    """Count the positions that a step runs through the decoder, and the FLOPs of its matrix products and attention.

    The causal half of attention counts in full, as in torch's table.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    trainer = make_trainer(way, path)
    positions: list[int] = []
    trainer.embeddings.register_forward_pre_hook(lambda _, arguments: positions.append(arguments[0].numel()))
    aten, counter = torch.ops.aten, FlopCounterMode(display=False)
    table = counter.flop_registry  # without some operators of the CPU
    table[aten.addmm_] = table[aten.addmm]
    table[aten._scaled_dot_product_flash_attention_for_cpu] = table[aten._scaled_dot_product_flash_attention]
    backward = table[aten._scaled_dot_product_flash_attention_backward]
    table[aten._scaled_dot_product_flash_attention_for_cpu_backward] = backward
    with counter:
        trainer.step(make_groups(PROMPTS, seed=0))
    flops = counter.get_total_flops()
    return {"positions": sum(positions), "microbatches": len(positions), "matrix_tflops": round(flops / 1e12, 3)}


def tokens_of(groups: list[ScoredGroup]) -> int:
    return sum(each.tokens for scored in groups for each in scored.group.trajectories)


# --- the comparison


def in_subprocess(what: str, way: str, path: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.trainer", f"--{what}", way, "--model", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_SECONDS)
    return json.loads(done.stdout.splitlines()[-1])


def run_round(path: Path) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    for way in WAYS:
        before = conditions()
        measured[way] = {**in_subprocess("way", way, path), "before": before}
        print(way, measured[way], file=sys.stderr)  # progress: a round takes minutes
    return measured


def compare(rounds: int, earlier: dict[str, Any], folder: Path) -> dict[str, Any]:
    from tests.bench.random_model import save_qwen3

    path = save_qwen3(folder / "model", **SHAPES)
    work = earlier.get("work") or {way: in_subprocess("count", way, path) for way in WAYS}
    return summary(work, [*earlier.get("rounds", []), *(run_round(path) for _ in range(rounds))])


def summary(work: dict[str, dict[str, float]], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    groups = make_groups(PROMPTS, seed=0)
    lengths = [len(each.completion.token_ids) for scored in groups for each in scored.group.trajectories]
    names = ("seconds", "tokens_per_second", "mib_above_model")
    return {
        "what": "trainer",
        **{f"ours_over_{baseline}": ratios(baseline, work, rounds) for baseline in BASELINES},
        "targets": {"ours_over_plain tokens_per_second": 1.3, "ours_over_plain mib_above_model": 0.5},
        **{way: {name: spread((each[way][name] for each in rounds), 2) for name in names} for way in WAYS},
        "work": work,
        "grad_norm": {way: rounds[-1][way]["grad_norm"] for way in WAYS},
        "completion_tokens": {"mean": round(float(np.mean(lengths)), 1), "longest": max(lengths)},
        "tokens": tokens_of(groups),
        "trajectories": len(lengths),
        "positions_of_a_microbatch": BUDGET,
        "rounds": rounds,
        "busy": busy(each[way]["before"] for each in rounds for way in WAYS),
        "machine": machine("torch", "transformers"),
    }


def ratios(baseline: str, work: dict[str, dict[str, float]], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare ours with a baseline: measured in each round, and counted."""
    measured = ("tokens_per_second", "mib_above_model")
    counted = ("positions", "matrix_tflops")
    return {
        **{name: spread((each["ours"][name] / each[baseline][name] for each in rounds), 3) for name in measured},
        **{name: round(work["ours"][name] / work[baseline][name], 3) for name in counted},
    }


def main() -> None:
    options = Options(__doc__, adds=True)
    options.add_argument("--way", choices=WAYS, help="measure only this one, in this process")
    options.add_argument("--count", choices=WAYS, help="count only the work of this one, in this process")
    options.add_argument("--model", type=Path)
    given, earlier = options.parse()
    if given.way:
        print(json.dumps(measure(given.way, given.model)))
        return
    if given.count:
        print(json.dumps(count_work(given.count, given.model)))
        return

    with tempfile.TemporaryDirectory() as folder:
        publish(compare(given.rounds, earlier, Path(folder)), given.out)


if __name__ == "__main__":
    main()

"""One GRPO step of the trainer against a plain implementation.

    python -m tests.bench.trainer [--rounds N] [--out FILE]

Both use the same random Qwen3 (512 wide, 8 layers, the real vocabulary of 151,936), the same trajectories with
long-tailed lengths, the same loss, AdamW, float32 and activation checkpointing. `ours` is the rank's step: FSDP2 over
one rank, packed microbatches, the head in chunks. `plain` is transformers as most trainers use it: trajectories padded
to the longest one, as many per microbatch as fill the same number of positions, full logits.

Each measurement is a separate process; the two alternate. Memory is the peak resident size during the step, minus the
size before the model was loaded and four times the parameters (parameters, gradients, AdamW's two moments). Both
report their gradient norm, which shows that they computed the same. Prints one JSON line.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from app.types import Completion, FinishReason, Group, Prompt, ScoredGroup, Trajectory, VersionSpan
from tests.bench.machine import MIB, machine, peak_rss_mib, reset_peak, rss_mib

SHAPES = {
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
PLAIN_MICROBATCH = 4  # trajectories in a microbatch of `plain`
WAYS = ("plain", "ours")


def make_groups(prompts: int, seed: int) -> list[ScoredGroup]:
    random = np.random.default_rng(seed)
    groups = []
    for index in range(prompts):
        prompt = Prompt(f"bench/{index}@0", tokens(random, PROMPT_TOKENS), "", "bench")
        lengths = np.minimum(LIMIT, random.lognormal(np.log(MEDIAN), SIGMA, GROUP_SIZE).astype(int) + 1)
        members = tuple(trajectory(prompt, random, int(length)) for length in lengths)
        groups.append(ScoredGroup(Group(prompt, members), random.normal(size=GROUP_SIZE).astype(np.float32)))
    return groups


def trajectory(prompt: Prompt, random: np.random.Generator, length: int) -> Trajectory:
    logprobs = np.full(length, -np.log(SHAPES["vocab_size"]), dtype=np.float32)
    spans = (VersionSpan(0, 0, length),)
    return Trajectory(prompt, Completion(tokens(random, length), logprobs, FinishReason.stop, spans), "", reward=0.0)


def tokens(random: np.random.Generator, count: int) -> np.ndarray:
    return random.integers(0, SHAPES["vocab_size"], count).astype(np.int32)


def save_model(folder: Path) -> Path:
    import torch

    from app.model.hf_import import transformers
    from app.model.tiny.tokenizer import build_tokenizer

    torch.manual_seed(0)
    transformers().Qwen3ForCausalLM(transformers().Qwen3Config(**SHAPES, dtype="float32")).save_pretrained(folder)
    build_tokenizer(4096).save_pretrained(folder)
    return folder


# --- the two implementations: load a model; return a function that trains one step and returns its gradient norm

Step = Callable[[list[ScoredGroup]], float]


def ours(path: Path) -> tuple[Step, int]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from app.config.algorithm import AlgorithmConfig, Correction
    from app.config.trainer import TrainerConfig
    from app.model.load import load
    from app.trainer.optimizer import PolicyOptimizer
    from app.trainer.step import StepSettings, TrainStep

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = load(path, mesh=init_device_mesh("cpu", (1,)), device="cpu", activation_checkpointing=True)
    config = TrainerConfig()
    budget = PLAIN_MICROBATCH * (PROMPT_TOKENS + LIMIT)
    settings = StepSettings(AlgorithmConfig(), Correction.none, 1.0, LIMIT, budget)
    step = TrainStep(policy, PolicyOptimizer(policy.parameters(), config), settings, torch.device("cpu"))

    def train(groups: list[ScoredGroup]) -> float:
        step.begin(1)
        step.add_groups(groups)
        return step.finish().metrics["grad_norm"]

    return train, sum(parameter.numel() for parameter in policy.parameters())


def plain(path: Path) -> tuple[Step, int]:
    import torch

    from app.config.trainer import TrainerConfig
    from app.model.hf_import import transformers

    model = transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    config = TrainerConfig()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )

    def train(groups: list[ScoredGroup]) -> float:
        flat = [pair for scored in groups for pair in zip(scored.group.trajectories, scored.advantages, strict=True)]
        longest = max(trajectory.tokens for trajectory, _ in flat)
        ids = torch.zeros(len(flat), longest, dtype=torch.int64)
        attention_mask = torch.zeros(len(flat), longest, dtype=torch.bool)
        completion_mask = torch.zeros(len(flat), longest, dtype=torch.bool)
        for row, (each, _) in enumerate(flat):
            token_ids = np.concatenate([each.prompt.token_ids, each.completion.token_ids])
            ids[row, : len(token_ids)] = torch.as_tensor(token_ids)
            attention_mask[row, : len(token_ids)] = True
            completion_mask[row, PROMPT_TOKENS : len(token_ids)] = True
        advantages = torch.tensor([float(advantage) for _, advantage in flat])
        for start in range(0, len(flat), PLAIN_MICROBATCH):
            rows = slice(start, start + PLAIN_MICROBATCH)
            logits = model(input_ids=ids[rows], attention_mask=attention_mask[rows], use_cache=False).logits[:, :-1]
            logs = torch.log_softmax(logits, dim=-1).gather(2, ids[rows, 1:, None]).squeeze(2)
            ratio = (logs - logs.detach()).exp()
            clipped = ratio.clamp(0.8, 1.2)
            objective = torch.minimum(ratio * advantages[rows, None], clipped * advantages[rows, None])
            mask = completion_mask[rows, 1:]
            loss = -((objective * mask).sum(1) / mask.sum(1)).sum() / len(flat)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return train, sum(parameter.numel() for parameter in model.parameters())


def measure(way: str, path: Path) -> dict[str, float]:
    """Measure one step, after a short step that allocates all memory. Runs in its own process."""
    import torch

    from app.model.hf_import import transformers

    # Its import must not count as memory of the model.
    transformers().AutoModelForCausalLM  # noqa: B018
    torch.set_num_threads(os.cpu_count() or 1)
    empty = rss_mib()
    train, parameters = {"ours": ours, "plain": plain}[way](path)
    warmup = make_groups(1, seed=1)
    train([ScoredGroup(Group(warmup[0].group.prompt, warmup[0].group.trajectories[:2]), warmup[0].advantages[:2])])
    gc.collect()
    reset_peak()
    scored_groups = make_groups(PROMPTS, seed=0)
    started = time.perf_counter()
    norm = train(scored_groups)
    seconds = time.perf_counter() - started
    trained = sum(each.tokens for scored in scored_groups for each in scored.group.trajectories)
    return {
        "seconds": seconds,
        "tokens": trained,
        "tokens_per_second": trained / seconds,
        "mib_above_model": peak_rss_mib() - empty - 4 * 4 * parameters / MIB,
        "grad_norm": norm,
    }


def compare(rounds: int, folder: Path) -> dict[str, Any]:
    path = save_model(folder / "model")
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            command = [sys.executable, "-m", "tests.bench.trainer", "--way", way, "--model", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results[way].append(json.loads(done.stdout.splitlines()[-1]))
    trajectories = [each for scored in make_groups(PROMPTS, 0) for each in scored.group.trajectories]
    lengths = [len(trajectory.completion.token_ids) for trajectory in trajectories]
    both = list(zip(results["ours"], results["plain"], strict=True))
    median = {
        way: {name: round(statistics.median(each[name] for each in rows), 3) for name in rows[0]}
        for way, rows in results.items()
    }
    return {
        "what": "trainer",
        "tokens_per_second_over_plain": ratio([a["tokens_per_second"] / b["tokens_per_second"] for a, b in both]),
        "memory_over_plain": ratio([a["mib_above_model"] / b["mib_above_model"] for a, b in both]),
        "targets": {"tokens_per_second_over_plain": 3.0, "memory_over_plain": 0.333},
        **median,
        "completion_tokens": {"mean": round(float(np.mean(lengths)), 1), "longest": max(lengths)},
        "trajectories": len(lengths),
        "rounds": rounds,
        "machine": machine("torch", "transformers"),
    }


def ratio(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help="measure only this one, in this process")
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way, arguments.model)))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = json.dumps(compare(arguments.rounds, Path(folder)))
    print(result)
    if arguments.out:
        arguments.out.write_text(result + "\n")


if __name__ == "__main__":
    main()

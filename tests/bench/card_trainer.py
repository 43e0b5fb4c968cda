"""One step of the trainer alone on a card: seconds, MFU and memory, by recomputation and kernels.

    python -m tests.bench.card_trainer [--cases NAME …] [--device cuda|npu] [--out FILE]

The models have the shapes of Qwen3-4B and Qwen3.5-9B with fewer layers and random weights, so that they fit one card
with plain SGD: what a layer costs is what counts. Each case is a process of its own that trains four times on the same
groups; the first time compiles and tunes, the median of the others counts. FLOPs, MFU and seconds are the step's own
metrics. A case that fails, of memory for instance, keeps its error. Prints one JSON line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from app.config.trainer import Checkpointing
from app.types import Prompt, ScoredGroup
from tests.bench.machine import MIB, machine, publish
from tests.bench.trainer import random_group, tokens

PROMPT_TOKENS = 128
GROUP_SIZE = 8
TRAINED = 4
DEADLINE_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its trajectories and how it is computed."""

    model: str
    layers: int
    lengths: tuple[int, ...]  # completion tokens
    budget: int  # tokens of a microbatch
    recompute: Checkpointing
    kernels: bool = True  # of linear attention; else torch's loop


SHORT, LONG = (1920,) * 16, (16256,) * 2
CASES = {
    "4b_none": Case("qwen3_4b", 12, SHORT, 8192, Checkpointing.none),
    "4b_matmuls": Case("qwen3_4b", 12, SHORT, 8192, Checkpointing.matmuls),
    "4b_attention": Case("qwen3_4b", 12, SHORT, 8192, Checkpointing.attention),
    "4b_all": Case("qwen3_4b", 12, SHORT, 8192, Checkpointing.all),
    "4b_long": Case("qwen3_4b", 12, LONG, 16384, Checkpointing.all),
    "9b_all": Case("qwen35_9b", 8, SHORT, 8192, Checkpointing.all),
    "9b_loop": Case("qwen35_9b", 8, SHORT, 8192, Checkpointing.all, kernels=False),
    "9b_none": Case("qwen35_9b", 8, SHORT, 8192, Checkpointing.none),
}


def groups_of(case: Case, vocabulary: int) -> list[ScoredGroup]:
    random = np.random.default_rng(0)
    groups = []
    for first in range(0, len(case.lengths), GROUP_SIZE):
        prompt = Prompt(f"bench/{first}@0", tokens(random, PROMPT_TOKENS, vocabulary), "", "bench")
        groups.append(random_group(prompt, case.lengths[first : first + GROUP_SIZE], random, vocabulary))
    return groups


def measure(case: Case, kind: str, folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from app.config.algorithm import AlgorithmConfig, Correction
    from app.config.device import DeviceKind
    from app.config.trainer import Compile, Optimizer, TrainerConfig
    from app.device import device_of
    from app.model.kernels import kernels_of
    from app.model.load import load
    from app.trainer.optimizer import PolicyOptimizer
    from app.trainer.step import StepSettings, TrainStep
    from tests.bench.random_model import save_random, text_config

    device = device_of(DeviceKind[kind])
    module = torch.get_device_module(device.torch_type)
    path = save_random(folder / "model", text_config(case.model, case.layers))
    backend = f"cpu:gloo,{device.torch_type}:{device.collective}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    kernels = kernels_of(device, Compile.auto)
    policy = load(
        path,
        mesh=init_device_mesh(device.torch_type, (1,)),
        device=device.torch_device(),
        compute_dtype=torch.bfloat16,
        kernels=kernels if case.kernels else replace(kernels, linear=None),
        activation_checkpointing=case.recompute,
    )
    attention = device.activate_attention(policy.heads) if device.activate_attention else None
    optimizer = PolicyOptimizer(
        policy.parameters(), TrainerConfig(optimizer=Optimizer.sgd), fused=device.fused_optimizer
    )
    settings = StepSettings(AlgorithmConfig(), Correction.none, 1.0, max(case.lengths), case.budget)
    peak = device.peak_tflops_of(module.get_device_name(0))
    step = TrainStep(
        policy, optimizer, settings, device.torch_device(), peak_flops=None if peak is None else peak * 1e12
    )
    groups = groups_of(case, 150_000)
    module.empty_cache()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    trained = []
    for version in range(1, TRAINED + 1):
        step.begin(version)
        step.add_groups(groups)
        trained.append(step.finish().metrics)
    timed = trained[1:]
    names = [
        name for name in timed[0] if name.startswith("time/") or name in ("trainer/mfu", "trainer/tokens_per_second")
    ]
    linear = policy.kernels.linear if hasattr(policy, "kernels") else None
    return {
        **{name: round(statistics.median(each[name] for each in timed), 4) for name in names},
        "peak_mib_above_state": round((module.max_memory_allocated() - before) / MIB),
        "state_mib": round(before / MIB),
        "attention": attention or "default",
        "linear": None if linear is None else [linear.convolve is not None, linear.delta_rule is not None],
        "grad_norm": timed[0].get("grad_norm"),
    }


def in_subprocess(name: str, kind: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.card_trainer", "--case", name, "--device", kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {DEADLINE_SECONDS} s"}
    if done.returncode != 0:
        sys.stderr.write(done.stderr[-3000:])
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--case", choices=CASES, help="measure only this one, in this process")
    parser.add_argument("--device", choices=("cuda", "npu"), default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.case:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(json.dumps(measure(CASES[given.case], given.device, Path(folder))) + "\n")
        return

    import torch

    cases = {}
    for name in given.cases:
        cases[name] = in_subprocess(name, given.device)
        sys.stderr.write(f"{name} {cases[name]}\n")
    hardware = torch.get_device_module(given.device).get_device_name(0)
    packages = machine("torch", "transformers", "triton")
    publish({"what": "card_trainer", "cases": cases, "hardware": hardware, "machine": packages}, given.out)


if __name__ == "__main__":
    main()

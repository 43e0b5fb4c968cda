"""Runs of several steps: one that saves a checkpoint midway, and one that resumes from it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from app.config.model import LoraConfig
from app.config.trainer import TrainerConfig
from app.trainer.checkpoint_state import RankState
from app.trainer.step import TrainStep
from app.types import ScoredGroup
from tests.trainer.support import Scenario, make_step, parameters
from tests.trainer.test_step import GRPO

TRAINER = TrainerConfig(lr=1e-3, warmup_steps=6)
STEPS, SAVED = 4, 2
BUDGET = 60  # tokens per rank and pass: three of four groups fill one on one rank, and on two
ALL_WEIGHTS = LoraConfig()


@dataclass(frozen=True)
class RunResult:
    """Results of a run. The same on all ranks."""

    metrics: dict[int, dict[str, float]]  # by step
    saved: dict[str, Tensor]  # parameters at capture, or right after restore
    after: dict[str, Tensor]  # parameters at the end
    checksums: dict[str, int] = field(default_factory=dict)  # CRC-32 of the files that all ranks wrote, by name


def trainer_of(path: Path, scenario: Scenario, mesh: DeviceMesh | None = None) -> tuple[TrainStep, RankState]:
    step = make_step(path, scenario, mesh)
    return step, RankState(step.model, step.optimizer, torch.device("cpu"), timeout_s=60)


def run_and_save(
    mesh: DeviceMesh | None, path: Path, groups: Sequence[ScoredGroup], folder: Path, lora: LoraConfig = ALL_WEIGHTS
) -> RunResult:
    """Run four steps. The state after the second is captured while the third accumulates, and written meanwhile."""
    torch.manual_seed(11)
    step, state = trainer_of(path, Scenario(GRPO, groups, trainer=TRAINER, budget=BUDGET, lora=lora), mesh)
    metrics = {version: _step(step, groups, version) for version in range(1, SAVED + 1)}
    folder.mkdir(exist_ok=True)
    saved = parameters(step.model)
    writing: list[Future[dict[str, int]]] = []
    with ThreadPoolExecutor(1) as pool:

        def capture() -> None:
            assert any(parameter.grad is not None for parameter in step.model.parameters())
            state.capture()
            writing.append(pool.submit(state.write, folder))

        metrics[SAVED + 1] = _step(step, groups, SAVED + 1, midway=capture)
        metrics |= {version: _step(step, groups, version) for version in range(SAVED + 2, STEPS + 1)}
        written = _of_all_ranks(writing[0].result(), mesh)
    return RunResult(metrics, saved, parameters(step.model), written)


def run_resumed(
    mesh: DeviceMesh | None, path: Path, groups: Sequence[ScoredGroup], folder: Path, lora: LoraConfig = ALL_WEIGHTS
) -> RunResult:
    """Run the last two steps, on a trainer that had another state before."""
    torch.manual_seed(12)
    step, state = trainer_of(path, Scenario(GRPO, groups, trainer=TRAINER, budget=BUDGET, lora=lora), mesh)
    _step(step, groups[::-1], 9)
    step.begin(10)
    step.old_logprobs(groups)  # a forward alone: the root stays gathered
    step.abort()
    state.restore(folder)
    saved = parameters(step.model)
    metrics = {version: _step(step, groups, version) for version in range(SAVED + 1, STEPS + 1)}
    return RunResult(metrics, saved, parameters(step.model))


def on_two_ranks(
    mesh: DeviceMesh, path: Path, groups: Sequence[ScoredGroup], one: Path, two: Path, lora: LoraConfig = ALL_WEIGHTS
) -> dict[str, RunResult]:
    """Run all scenarios of two ranks. One rank wrote the checkpoint `one`; `two` is written here."""
    return {
        "2": run_and_save(mesh, path, groups, two, lora),
        "2 to 2": run_resumed(mesh, path, groups, two, lora),
        "1 to 2": run_resumed(mesh, path, groups, one, lora),
    }


def _of_all_ranks(checksums: dict[str, int], mesh: DeviceMesh | None) -> dict[str, int]:
    if mesh is None:
        return checksums
    gathered: list[dict[str, int]] = [{}] * mesh.size()
    dist.all_gather_object(gathered, checksums)
    return {name: crc32 for each in gathered for name, crc32 in each.items()}


def _step(
    step: TrainStep, groups: Sequence[ScoredGroup], version: int, *, midway: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Train one step. Every version has different data. `midway` is called before the last group is added."""
    data = groups[: len(groups) - version % 3]
    step.begin(version)
    step.add_groups(data[:-1])
    midway()
    step.add_groups(data[-1:])
    return dict(step.finish().metrics)

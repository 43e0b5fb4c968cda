"""Train steps on a small random Qwen3: random groups, scenarios for one process or several ranks, their results."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from app.config.algorithm import AlgorithmConfig, Correction
from app.config.device import DeviceKind, Dtype
from app.config.model import LoraConfig
from app.config.trainer import Optimizer, TrainerConfig
from app.model.load import load
from app.model.policy import PolicyModel, named_trained_tensors
from app.trainer.optimizer import PolicyOptimizer
from app.trainer.step import StepSettings, TrainStep
from app.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    ScoredGroup,
    StepReport,
    TokenSequence,
    Trajectory,
    VersionSpan,
)
from tests.model.lora.support import move

VOCABULARY = 101
TEMPERATURE = 0.7
LIMIT = 12  # completion tokens
SGD = TrainerConfig(optimizer=Optimizer.sgd, lr=0.05, weight_decay=0.0, max_grad_norm=1e9)


def scored_groups(count: int, size: int = 4, *, seed: int = 0, shortest: int = 0) -> list[ScoredGroup]:
    """Make groups of random tokens, lengths and advantages. Completions of `LIMIT` tokens are truncated."""
    random = np.random.default_rng(seed)
    groups = []
    for index in range(count):
        prompt = Prompt(f"random/{index}@0", tokens(random, int(random.integers(1, 7))), "", "random")
        trajectories = []
        for _ in range(size):
            length = int(random.integers(shortest, LIMIT + 1))
            reason = FinishReason.length if length == LIMIT else FinishReason.stop
            logprobs = random.normal(-3, 1, length).astype(np.float32)
            completion = Completion(tokens(random, length), logprobs, reason, (VersionSpan(0, 0, length),))
            trajectories.append(Trajectory(prompt, completion, "", reward=0.0))
        advantages = random.normal(size=size).astype(np.float32)
        groups.append(ScoredGroup(Group(prompt, tuple(trajectories)), advantages))
    return groups


def tokens(random: np.random.Generator, count: int) -> np.ndarray:
    return random.integers(0, VOCABULARY, count).astype(np.int32)


def demonstrations(count: int, *, seed: int = 5) -> list[TokenSequence]:
    """Make sequences of random tokens, of which random ones after the first are imitated."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(random.integers(2, LIMIT + 6))
        imitated = random.random(length) < 0.6
        imitated[0], imitated[-1] = False, True
        made.append(TokenSequence.demonstration(tokens(random, length), imitated))
    return made


def with_each(groups: Sequence[ScoredGroup], change: Callable[[Trajectory], Trajectory]) -> list[ScoredGroup]:
    """Return the groups with every trajectory changed, in order."""
    return [
        replace(scored, group=replace(scored.group, trajectories=tuple(map(change, scored.group.trajectories))))
        for scored in groups
    ]


def sampled(path: Path, groups: Sequence[ScoredGroup], *, noise: float = 0.1, seed: int = 1) -> list[ScoredGroup]:
    """Return the groups with rollout log-probabilities of this model, plus some noise for the engine's mismatch."""
    from tests.trainer.plain import token_logprobs, transformers_model

    random = np.random.default_rng(seed)
    model = transformers_model(path)

    def change(trajectory: Trajectory) -> Trajectory:
        exact = token_logprobs(model, trajectory, TEMPERATURE)[0].numpy()
        logprobs = (exact + random.normal(0, noise, len(exact))).astype(np.float32)
        return replace(trajectory, completion=replace(trajectory.completion, logprobs=logprobs))

    with torch.no_grad():
        return with_each(groups, change)


def unreadable(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Return the groups with a token outside of the vocabulary: their forward raises `IndexError`."""

    def change(trajectory: Trajectory) -> Trajectory:
        prompt = replace(trajectory.prompt, token_ids=np.full_like(trajectory.prompt.token_ids, VOCABULARY))
        return replace(trajectory, prompt=prompt)

    return with_each(groups, change)


@dataclass(frozen=True)
class Scenario:
    """A step, and optionally an aborted step before it."""

    algorithm: AlgorithmConfig
    groups: Sequence[ScoredGroup]
    correction: Correction = Correction.none
    trainer: TrainerConfig = field(default_factory=lambda: SGD)
    budget: int = 40  # tokens per rank and pass
    pieces: int = 1  # `add_groups` calls
    before: str | None = None  # "abort", "failed forward", "failed backward": why an earlier step was aborted
    reference: Path | None = None  # directory of the frozen reference; with adapters the base is the reference
    lora: LoraConfig = field(default_factory=LoraConfig)
    moved: bool = False  # whether adapters start at random values, and not at B = 0
    compute_dtype: torch.dtype = torch.float32
    demonstrations: Sequence[TokenSequence] = ()


@dataclass(frozen=True)
class Result:
    """Results, the same on all ranks."""

    version: int
    updates: int
    metrics: dict[str, float]
    gradients: list[dict[str, Tensor]]  # of each update, by parameter, divided but not clipped
    before: dict[str, Tensor]  # parameters
    after: dict[str, Tensor]
    cross_entropy: float | None = None  # of the demonstrations, before the step

    def moved(self, name: str) -> Tensor:
        return self.after[name] - self.before[name]


class RecordingOptimizer(PolicyOptimizer):
    """Also records the gradients of each update."""

    def __init__(self, policy: PolicyModel, config: TrainerConfig, **options: Any) -> None:
        super().__init__(policy.parameters(), config, **options)
        self.policy = policy
        self.gradients: list[dict[str, Tensor]] = []

    def _scale(self, gradients: list[Tensor], scale: float) -> None:
        super()._scale(gradients, scale)
        named = named_trained_tensors(self.policy)
        self.gradients.append({name: full(p.grad) for name, p in named if p.grad is not None})


def full(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def parameters(policy: PolicyModel) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in named_trained_tensors(policy)}


def make_step(path: Path, scenario: Scenario, mesh: DeviceMesh | None = None, **options: Any) -> TrainStep:
    dtype = scenario.compute_dtype
    policy = load(
        path,
        mesh=mesh,
        device="cpu",
        param_dtype=dtype if mesh is None else torch.promote_types(dtype, torch.float32),
        compute_dtype=dtype,
        lora=scenario.lora,
    )
    if scenario.moved:
        move(policy)
    reference = policy if scenario.lora.enabled and scenario.algorithm.needs_reference else None
    if scenario.reference is not None:
        reference = load(scenario.reference, mesh=mesh, device="cpu").requires_grad_(False)
    settings = StepSettings(scenario.algorithm, scenario.correction, TEMPERATURE, LIMIT, scenario.budget)
    optimizer = RecordingOptimizer(policy, scenario.trainer, **options)
    return TrainStep(policy, optimizer, settings, torch.device("cpu"), reference)


def play(path: Path, scenario: Scenario, mesh: DeviceMesh | None = None, **options: Any) -> Result:
    """Play the scenario on this rank. `options` are the optimizer's."""
    step = make_step(path, scenario, mesh, **options)
    before = parameters(step.model)
    if scenario.before is not None:
        aborted_step(step, scenario)
    cross_entropy = None
    if scenario.demonstrations:
        cross_entropy = -float(np.concatenate(step.logprobs(scenario.demonstrations)).mean(dtype=np.float64))
    report = train(step, scenario)
    assert isinstance(step.optimizer, RecordingOptimizer)
    return Result(
        report.version,
        report.updates,
        dict(report.metrics),
        step.optimizer.gradients,
        before,
        parameters(step.model),
        cross_entropy,
    )


def rank_spec(path: Path, logs: Path, **settings: Any) -> Any:
    """The `RankSpec` of a rank on a CPU, but for these settings."""
    from app.trainer.rank import RankSpec

    defaults: dict[str, Any] = {
        "device": DeviceKind.cpu,
        "dtype": Dtype.float32,
        "model_path": path,
        "trust_remote_code": False,
        "algorithm": AlgorithmConfig(),
        "correction": Correction.none,
        "temperature": TEMPERATURE,
        "max_completion_tokens": LIMIT,
        "run_updates": 1,
        "reference": False,
        "ranks": 1,
        "threads": 1,
        "seed": 0,
        "logs": logs,
    }
    return RankSpec(**defaults | settings)


def train(step: TrainStep, scenario: Scenario, version: int = 1) -> StepReport:
    step.begin(version)
    pieces = split(scenario.groups, scenario.pieces)
    for piece in pieces:
        if scenario.algorithm.needs_old_logprobs:
            step.old_logprobs(piece)
    for piece in pieces:
        step.add_groups(piece)
    step.add_demonstrations(scenario.demonstrations)
    return step.finish()


def split(groups: Sequence[ScoredGroup], pieces: int) -> list[Sequence[ScoredGroup]]:
    boundaries = np.linspace(0, len(groups), pieces + 1).astype(int)
    return [groups[start:end] for start, end in pairwise(boundaries)]


class BackwardFailed(Exception):
    """Raised by the broken backward."""


def aborted_step(step: TrainStep, scenario: Scenario) -> None:
    """Compute part of a step and abort it, for the reason `scenario.before`."""
    others = scored_groups(6, seed=9, shortest=3)
    step.begin(7)
    if scenario.algorithm.needs_old_logprobs:
        step.old_logprobs(others)
    step.add_groups(others)

    expected: type[Exception] | None = None
    hook = None
    if scenario.before == "failed forward":
        others, expected = unreadable(others), IndexError
    elif scenario.before == "failed backward":
        expected = BackwardFailed
        attention: Any = step.model.layers[1].self_attn
        hook = attention.register_full_backward_pre_hook(_fail)

    with contextlib.suppress(expected) if expected else contextlib.nullcontext():
        step.add_groups(others)
        assert expected is None, "add_groups did not fail"
    if hook is not None:
        hook.remove()
    assert step.open
    step.abort()
    assert not step.open


def _fail(*_: object) -> None:
    raise BackwardFailed

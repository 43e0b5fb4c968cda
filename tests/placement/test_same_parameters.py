"""With recorded completions in place of sampling, fully_async at staleness 0 and colocate give the same parameters.

So do episodes, and an environment that ends after one reply gives the same as no environment. The trainer is the real
split step over a small random Qwen3; completions, their times and their rewards are recorded. Of the episodes only the
worker's process is left out.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.config import RunConfig
from app.config.algorithm import Aggregation, AlgorithmConfig
from app.config.placement import PlacementKind, Stream
from app.config.reward import RewardConfig
from app.config.trainer import Optimizer as Kind
from app.config.trainer import TrainerConfig
from app.environment.protocol import Reply, Task
from app.environment.rendering import renderer_for
from app.environment.wire import Limits
from app.model.load import load
from app.placement.controller import PlacementController
from app.reward.scorer import Scorer
from app.trainer.optimizer import PolicyOptimizer
from app.trainer.step import StepSettings, TrainStep
from app.types import (
    Completion,
    FinishReason,
    GroupRequest,
    MemoryUse,
    ScoredGroup,
    StepReport,
    TrainerMemory,
    VersionSpan,
)
from tests.simulated_environments import InProcessEnvironments
from tests.simulation import RIGHT, WRONG, SimEngine, World, config, play

STEPS = 2
GRPO = AlgorithmConfig(prompts_per_step=6, group_size=4)
DAPO = replace(GRPO, name="dapo", clip_high=0.28, aggregation=Aggregation.token_mean, dynamic_sampling=True)
SEVERAL_UPDATES = replace(GRPO, updates_per_step=3, dynamic_sampling=True)


class Recorded(SimEngine):
    """Gives each prompt its recorded completions, whoever asks and whenever."""

    async def generate(self, request: GroupRequest) -> list[Completion]:
        await super().generate(request)
        rng = np.random.default_rng(abs(hash_of(request.prompt_id)))
        useless = rng.random() < 0.3
        completions = []
        for member in range(request.group_size):
            length = int(rng.integers(2, 14))
            tokens = np.full(length, 5, dtype=np.int32)  # blanks, which the reward strips, and the answer
            tokens[0] = 4
            tokens[-1] = RIGHT if useless or (member + rng.integers(2)) % 2 or member == 0 else WRONG
            tokens[-1] = WRONG if member == 1 and not useless else tokens[-1]
            logprobs = rng.normal(-3.0, 1.0, length).astype(np.float32)
            spans = (VersionSpan(request.version, 0, length),)
            completions.append(Completion(tokens, logprobs, FinishReason.stop, spans))
        return completions


def hash_of(prompt_id: str) -> int:
    return random.Random(prompt_id).getrandbits(32)


class InProcess:
    """`Trainer` over a split step in this process."""

    calls = 0

    def __init__(self, path: Path, made: RunConfig, optimizer: Kind) -> None:
        self.model = load(path, mesh=None, device="cpu")
        settings = TrainerConfig(lr=0.05 if optimizer is Kind.sgd else 1e-3, optimizer=optimizer, weight_decay=0.0)
        step = StepSettings(made.algorithm, made.correction, 1.0, 16, tokens_per_microbatch=40)
        self.step = TrainStep(self.model, PolicyOptimizer(self.model.parameters(), settings), step, torch.device("cpu"))
        self.reports: list[StepReport] = []

    async def begin_step(self, *, version: int) -> None:
        self.step.begin(version)

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        await asyncio.sleep(0.5)
        self.step.add_groups(groups)

    async def finish_step(self) -> StepReport:
        self.reports.append(self.step.finish())
        return self.reports[-1]

    async def abort_step(self) -> None:
        self.step.abort()

    async def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        self.step.old_logprobs(groups)

    async def memory(self) -> list[MemoryUse]:
        return []

    async def offload(self, part: TrainerMemory) -> None: ...

    async def onload(self, part: TrainerMemory) -> None: ...

    @property
    def parameters(self) -> torch.Tensor:
        return flat(self.model)


def train(
    folder: Path,
    model: Path,
    made: RunConfig,
    optimizer: Kind,
    *,
    engine: type[SimEngine] = Recorded,
    environments: InProcessEnvironments | None = None,
    reward: str | None = None,
) -> tuple[InProcess, int]:
    """Return the trainer after a run on two engines, and the requests that they got."""
    trainer = InProcess(model, made, optimizer)
    seconds = lambda prompt_id: 0.2 + random.Random(f"time {prompt_id}").random() * 3  # noqa: E731
    world = World(made, folder, seconds, trainer=trainer, environments=environments)  # type: ignore[arg-type]
    if reward is not None:
        world.scorer = Scorer(RewardConfig(components={reward: 1.0}))
    engines = [engine(seconds, world.right) for _ in range(2)]

    def use_engines(controller: PlacementController) -> None:
        controller.context.pool.engines[:] = engines
        world.sync.engines = engines

    play(world, at_start=use_engines)
    return trainer, sum(each.calls.total() for each in engines)


def first_parameters(model: Path) -> torch.Tensor:
    return flat(load(model, mesh=None, device="cpu"))


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def assert_same(one: InProcess, other: InProcess, model: Path, *, within: float) -> None:
    """The parameters have moved from those of the model, to the same place but for a fraction of the way."""
    first = first_parameters(model)
    moved, apart = (one.parameters - first).norm(), (one.parameters - other.parameters).norm()
    assert moved > 1e-4 * first.norm()
    assert apart < min(1e-6 * first.norm(), within * moved)
    for ours, theirs in zip(one.reports, other.reports, strict=True):
        assert ours.metrics["mismatch/kl"] == pytest.approx(theirs.metrics["mismatch/kl"], rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "stream", "optimizer"),
    [
        pytest.param(GRPO, Stream.auto, Kind.sgd, id="grpo streamed"),
        pytest.param(DAPO, Stream.auto, Kind.adamw, id="dapo streamed"),
        pytest.param(SEVERAL_UPDATES, Stream.off, Kind.sgd, id="dynamic sampling and several updates"),
    ],
)
def test_fully_async_at_staleness_0_and_colocate_give_the_same_parameters(
    tmp_path: Path, model: Path, algorithm: AlgorithmConfig, stream: Stream, optimizer: Kind
) -> None:
    torch.set_num_threads(1)
    common: dict[str, Any] = {"steps": STEPS, "algorithm": algorithm, "max_inflight_groups": 5}
    colocate, _ = train(tmp_path, model, config(PlacementKind.colocate, **common), optimizer)
    asynchronous, _ = train(tmp_path, model, config(max_staleness=0, stream=stream, **common), optimizer)
    assert_same(colocate, asynchronous, model, within=1e-3)
    for one, other in zip(colocate.reports, asynchronous.reports, strict=True):
        assert one.updates == other.updates == algorithm.updates_per_step
        assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-5)


class Seeded:
    """One to three turns, as the seed of the task says; the score is what the last reply deserves."""

    async def begin(self, task: Task) -> None:
        self.task = task
        self.random = random.Random(task.seed)
        self.turns = self.random.randint(1, 3)
        self.last = ""

    async def step(self, reply: Reply) -> str | None:
        self.last = reply.text.strip()
        await asyncio.sleep(self.random.uniform(0, 5))
        self.turns -= 1
        return f"{self.random.randrange(100)}+{self.random.randrange(100)}=" if self.turns else None

    async def score(self) -> float:
        return float(self.last == self.task.answer)


class OneReply:
    """What no environment is, too."""

    async def begin(self, task: Task) -> None: ...

    async def step(self, reply: Reply) -> None: ...

    async def close(self, *, force: bool = False) -> None: ...


class RecordedTurns(SimEngine):
    """Says the same in each turn of each member, whoever asks and whenever."""

    async def generate(self, request: GroupRequest) -> list[Completion]:
        await super().generate(request)
        if request.turn:
            turn, *_, member = request.turn.split()  # "2 of episode 7 of member 3"
            return [self.reply(request, f"{request.prompt_id}/{member}/{turn}")]
        return [self.reply(request, f"{request.prompt_id}/{member}/1") for member in range(request.group_size)]

    def reply(self, request: GroupRequest, name: str) -> Completion:
        rng = np.random.default_rng(hash_of(name))
        length = min(int(rng.integers(2, 14)), request.sampling.max_tokens)
        tokens = np.full(length, 5, dtype=np.int32)  # blanks, which the reward strips, and the answer
        tokens[0] = 4
        tokens[-1] = rng.choice([RIGHT, WRONG])
        logprobs = rng.normal(-3.0, 1.0, length).astype(np.float32)
        return Completion(tokens, logprobs, FinishReason.stop, (VersionSpan(request.version, 0, length),))


def environments_of(make: Callable[[], Any], model: Path) -> InProcessEnvironments:
    return InProcessEnvironments(make, renderer_for("plain", str(model)), Limits(8, None, 100, 1e6, 1e6))


def test_episodes_give_the_same_parameters_in_both_placements(tmp_path: Path, model: Path) -> None:
    torch.set_num_threads(1)
    common: dict[str, Any] = {"steps": 2, "algorithm": GRPO, "max_inflight_groups": 5, "max_completion_tokens": 60}
    runs = []
    for made in (config(PlacementKind.colocate, **common), config(max_staleness=0, stream=Stream.off, **common)):
        environments = environments_of(Seeded, model)
        runs.append(train(tmp_path, model, made, Kind.sgd, engine=RecordedTurns, environments=environments))
    (colocate, turns), (asynchronous, _) = runs
    assert turns > 1.5 * 2 * 6 * 4
    assert_same(colocate, asynchronous, model, within=1e-6)


@pytest.mark.parametrize("kind", list(PlacementKind))
def test_an_environment_that_ends_after_one_reply_gives_the_parameters_of_a_single_turn(
    kind: PlacementKind, tmp_path: Path, model: Path
) -> None:
    """Bit by bit, after three steps."""
    torch.set_num_threads(1)
    made = config(kind, steps=3, algorithm=GRPO, max_staleness=0, stream=Stream.off)
    single, groups = train(tmp_path, model, made, Kind.sgd, engine=RecordedTurns)
    environments = environments_of(OneReply, model)
    episodes, turns = train(
        tmp_path, model, made, Kind.sgd, engine=RecordedTurns, environments=environments, reward="exact"
    )
    assert turns >= 4 * groups - 4 * 6
    assert len(single.reports) == 3
    assert torch.equal(single.parameters, episodes.parameters)
    assert not torch.equal(single.parameters, first_parameters(model))
    for one, other in zip(single.reports, episodes.reports, strict=True):
        same = {name for name in one.metrics if not name.startswith(("time/", "trainer/tokens_per"))}
        assert {name: one.metrics[name] for name in same} == {name: other.metrics[name] for name in same}

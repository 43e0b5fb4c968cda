"""With recorded replies in place of sampling, episodes give the same parameters in both placements, and an environment
that ends after one reply the same as no environment.

The trainer, the driver's episodes, the worker's and its renderer are the real ones; only the process is left out.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.config.algorithm import AlgorithmConfig
from app.config.placement import PlacementKind, Stream
from app.config.trainer import Optimizer as Kind
from app.environment.protocol import Reply, Task
from app.environment.rendering import renderer_for
from app.environment.wire import Limits
from app.types import Completion, FinishReason, GroupRequest, VersionSpan
from tests.placement.test_same_parameters import assert_same, first_parameters, hash_of, train
from tests.simulated_environments import InProcessEnvironments
from tests.simulation import RIGHT, WRONG, SimEngine, config

GRPO = AlgorithmConfig(prompts_per_step=6, group_size=4)


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


def test_fully_async_at_staleness_0_and_colocate_give_the_same_parameters(tmp_path: Path, model: Path) -> None:
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

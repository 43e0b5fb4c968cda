"""When a lost trainer is started again, and when its loss ends the run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.placement import PlacementKind
from app.errors import TrainerLost
from app.mode import train
from app.mode.train import TrainingRun
from tests.simulation import World, config

KILLED = "trainer rank 0 died during start: killed on purpose"
ACCURACY = 0.75


async def nothing(*_: object) -> None: ...


def run_with(starts: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, TrainingRun]:
    """A run whose trainers, in this order, die while they start, are lost in a step, or train to the end."""
    settings = config(PlacementKind.colocate, steps=2)
    settings.checkpoint.every = 1
    settings.checkpoint.keep = 2
    world = World(settings, folder)
    context = world.context()
    fates = iter(starts)

    @asynccontextmanager
    async def start_trainer_workers(*_: object, **__: object) -> AsyncIterator[SimpleNamespace]:
        fate = next(fates)
        if fate == "dies":
            raise TrainerLost(KILLED)
        world.trainer.hang = None if fate == "trains" else "step"
        yield SimpleNamespace(trainer=PlainTrainer(), synchronizer=SimpleNamespace(abort=nothing))

    class PlainTrainer:
        broken = True

        async def checkpoint_bytes(self) -> int:
            return 0

    async def restore_or_initialize(*_: object) -> int:
        return 0

    async def play(controller: object) -> float:
        if world.trainer.hang:
            raise TrainerLost("trainer rank 0 died during finish_step")
        return ACCURACY

    workers: Any = SimpleNamespace(
        supervisor=context.supervisor, inputs=SimpleNamespace(prompts=SimpleNamespace(train=world.cursor))
    )
    run = TrainingRun(settings, None, folder, world.recorder, workers)  # type: ignore[arg-type]
    monkeypatch.setattr(train, "start_trainer_workers", start_trainer_workers)
    monkeypatch.setattr(run, "find_resume_point", nothing)
    monkeypatch.setattr(run, "restore_or_initialize", restore_or_initialize)
    monkeypatch.setattr(run, "_context", lambda *_: context)
    monkeypatch.setattr(run, "run", play)
    return world, run


def test_a_rank_that_dies_while_the_trainer_restarts_costs_one_more_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, run = run_with(["is lost", "dies", "trains"], tmp_path, monkeypatch)
    assert asyncio.run(asyncio.wait_for(run.train_with_restarts(), 60)) == ACCURACY
    assert run.restarts == 2
    assert f"restarting the trainer: {KILLED}" in world.recorder.warnings


def test_a_rank_that_dies_at_the_first_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = run_with(["dies", "trains"], tmp_path, monkeypatch)
    with pytest.raises(TrainerLost, match=KILLED):
        asyncio.run(asyncio.wait_for(run.train_with_restarts(), 60))
    assert run.restarts == 0

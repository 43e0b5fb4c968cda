"""A trainer that fails: its ranks are rebuilt, and the run continues from the last finished or the last saved step."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.placement import PlacementKind
from app.data.cursor import PromptCursor
from app.errors import TrainerError
from app.mode import train
from app.mode.train import TrainingRun
from app.placement.emergency_checkpoint import save_last_step
from app.placement.fully_async import FullyAsync
from tests.checkpoint.plain_files import PlainFiles
from tests.mode.test_ends_of_runs import training_run
from tests.simulation import BOTH, SimTrainer, World, config, virtual, without_threads

STEPS = 6
DIES_AT_START = None


class Failing(SimTrainer):
    """Fails at a call in step `at`; with `aborts_too` also at the abort after it."""

    def __init__(self, call: str = "", at: int = 0, *, aborts_too: bool = False) -> None:
        super().__init__(seconds=0.001, finish=0.002)
        self.call, self.at, self.aborts_too = call, at, aborts_too

    def _raise(self, call: str) -> None:
        step = len(self.trained) + self.restored + 1
        if (step, call) == (self.at, self.call) or (call == "abort_step" and self.aborts_too):
            raise TrainerError(f"rank 1 failed during {call}")

    async def write(self, folder: Path) -> dict[str, int]:
        return await PlainFiles().write(folder)


def run(
    world: World, trainers: Sequence[SimTrainer | None], monkeypatch: pytest.MonkeyPatch, *, every: int = 0
) -> TrainingRun:
    """Train with these trainers, one after the other; None dies while it starts."""
    world.config.checkpoint.keep = 2
    world.config.checkpoint.every = every
    lives = iter(trainers)

    @asynccontextmanager
    async def start_trainer_workers(*_: object, **__: object) -> AsyncIterator[SimpleNamespace]:
        trainer = next(lives)
        if trainer is DIES_AT_START:
            raise TrainerError("rank 0 died during start")
        world.sync.trainer = trainer
        yield SimpleNamespace(trainer=trainer, synchronizer=world.sync)

    async def main() -> TrainingRun:
        made = training_run(world, world.context())
        await made.train_with_restarts()
        return made

    monkeypatch.setattr(train, "start_trainer_workers", start_trainer_workers)
    monkeypatch.setattr(TrainingRun, "_identity", {})
    return asyncio.run(asyncio.wait_for(main(), 60))


def small(kind: PlacementKind, folder: Path) -> World:
    return World(config(kind, steps=STEPS), folder, lambda prompt_id: 0.001, push_seconds=0.001)


def assert_whole(world: World) -> None:
    """Every step was recorded once, and every prompt drawn was trained on once."""
    assert [step for step, _, _ in world.recorder.ledger] == list(range(1, STEPS + 1))
    assert [line["step"] for line in world.recorder.lines] == list(range(1, STEPS + 1))
    trained = Counter(prompt for _, prompts, _ in world.recorder.ledger for prompt in prompts)
    drawn = PromptCursor(world.cursor.prompts, seed=0, shuffle=True).take(trained.total())
    assert trained == Counter(prompt.id for prompt in drawn)


@BOTH
@pytest.mark.parametrize(
    ("trainers", "trained"),
    [
        ([("begin_step", 4), ()], [[0, 1, 2], [3, 4, 5]]),
        ([("add_groups", 4), ()], [[0, 1, 2], [3, 4, 5]]),
        ([("finish_step", 4), ()], [[0, 1, 2], [3, 4, 5]]),
        ([("finish_step", 1), ()], [[], [0, 1, 2, 3, 4, 5]]),  # it starts over
        ([("add_groups", 3), DIES_AT_START, ()], [[0, 1], None, [2, 3, 4, 5]]),
        # More failures than recovery.max_restarts=3, with steps between them.
        ([*(("add_groups", step) for step in range(2, 7)), ()], [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_after_a_failed_step_new_ranks_continue_from_the_step_before(
    kind: PlacementKind, trainers: list[Any], trained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = small(kind, tmp_path)
    lives = [each if each is DIES_AT_START else Failing(*each) for each in trainers]
    made = run(world, lives, monkeypatch)
    assert made.restarts == len(trainers) - 1
    assert_whole(world)
    assert [each and [version for version, _ in each.trained] for each in lives] == trained


@pytest.mark.parametrize("first", [[DIES_AT_START], [Failing("add_groups", 3) for _ in range(4)]])
def test_a_first_start_that_fails_and_a_step_that_fails_every_time_end_the_run(
    first: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recovery.max_restarts=3."""
    with pytest.raises(TrainerError, match=r"rank 1 failed|rank 0 died during start"):
        run(small(PlacementKind.colocate, tmp_path), [*first, Failing()], monkeypatch)


@BOTH
def test_ranks_that_cannot_abort_are_rebuilt_from_the_last_checkpoint(
    kind: PlacementKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = small(kind, tmp_path)
    trainers = [Failing("finish_step", 4, aborts_too=True), Failing()]
    run(world, trainers, monkeypatch, every=2)
    assert_whole(world)
    assert [[version for version, _ in each.trained] for each in trainers] == [[0, 1, 2], [2, 3, 4, 5]]
    assert any("step 3 was not saved: rank 1" in warning for warning in world.recorder.warnings)


def test_a_signal_while_a_failed_run_saves_does_not_lose_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def save(_: object) -> None:
        begun.set()
        await asyncio.sleep(0.05)
        ended.set()

    async def failed() -> float:
        raise TrainerError("rank 1 failed")

    async def main() -> None:
        made = training_run(world, world.context())
        running = asyncio.ensure_future(made.run(SimpleNamespace(run=failed)))  # type: ignore[arg-type]
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    world = small(PlacementKind.colocate, tmp_path)
    monkeypatch.setattr(train, "save_last_step", save)
    asyncio.run(main())
    assert ended.is_set()


@pytest.mark.parametrize("version", [None, 5])
@virtual
async def test_parameters_that_an_update_may_have_changed_are_not_saved(
    version: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    world = World(config(), tmp_path)
    world.config.checkpoint.keep = 2
    controller = FullyAsync(world.context(), 3)

    async def found() -> int | None:
        return version

    world.trainer.version = found  # type: ignore[method-assign]
    await save_last_step(controller)
    (warning,) = world.recorder.warnings
    assert "step 3 was not saved" in warning
    assert not (tmp_path / "checkpoints" / "latest").exists()

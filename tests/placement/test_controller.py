"""What a step records, and what failing to record it costs."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from app.algorithm.filter import RolloutCounts
from app.checkpoint import folder
from app.checkpoint.run_state import read_state
from app.config.checkpoint import CheckpointConfig
from app.config.placement import PlacementKind
from app.errors import RunError
from app.placement import controller as placement_controller
from app.placement.step_metrics import step_metrics
from app.types import Ending, Episode, Group, InFlight, ScoredGroup, StepReport, SyncReport, Turn
from tests.algorithm.groups import group
from tests.simulation import BOTH, SimTrainer, World, config, play, without_threads


class Versioned(SimTrainer):
    """Its checkpoints have one file, with the version of the captured parameters."""

    async def capture(self) -> int:
        self.captured = await self.version()
        return 0

    async def write(self, folder: Path) -> dict[str, int]:
        (folder / "policy").write_text(str(self.captured))
        return {"policy": 0}


@BOTH
def test_the_best_evaluation_is_kept_although_no_checkpoint_was_due(
    kind: PlacementKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = [0.9, 0.3, 0.7, 0.5, 0.7, 0.6, 0.1]  # of versions 0 to 6; the first is of the untrained model

    async def evaluated(_: object, __: object, ___: object, version: int) -> tuple[dict[str, dict[str, float]], list]:
        await asyncio.sleep(10.0)  # in fully_async, the next step has all of its groups by then
        return {"one": {"accuracy": accuracies[version]}, "two": {"accuracy": accuracies[version]}}, []

    monkeypatch.setattr(placement_controller, "evaluate", evaluated)
    without_threads(monkeypatch)
    settings = config(kind, max_staleness=0, before_train=True)
    settings.eval.every = 1
    settings.checkpoint = CheckpointConfig(keep=1)
    world = World(settings, tmp_path, trainer=Versioned(seconds=0.1, finish=0.2))
    play(world)
    assert {each.name for each in (tmp_path / "checkpoints").iterdir()} == {"latest", "best", "step_2", "step_6"}
    best = folder.best(tmp_path)
    assert best is not None
    assert (best.name, read_state(best).accuracy, (best / "policy").read_text()) == ("step_2", 0.7, "2")
    assert read_state(tmp_path / "checkpoints" / "step_6").accuracy == 0.1


@BOTH
def test_a_step_that_cannot_be_recorded_ends_the_run_with_its_reason(kind: PlacementKind, tmp_path: Path) -> None:
    world = World(config(kind), tmp_path)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            raise OSError(28, "No space left on device")

    world.recorder.log = log  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"step 3 .*No space left on device"):
        play(world)


def measured(*groups: Group) -> dict[str, float]:
    scored = [ScoredGroup(each, each.rewards.astype("float32")) for each in groups]
    report, sync = StepReport(1, 1, {}), SyncReport(1, 0, 1, {"total": 1.0}, False, 0, None)
    seconds = {"step": 1.0}
    return step_metrics(scored, RolloutCounts(), report, sync, seconds, trained_version=0, in_flight=InFlight.retract)


def test_the_accept_length_is_tokens_over_the_passes_that_verified_drafts() -> None:
    drafted = group([0.0, 1.0, 1.0], lengths=[10, 2, 1])
    passes = (3, 1, 0)  # the first token of each is sampled with the prompt
    drafted = Group(
        drafted.prompt,
        tuple(
            replace(each, completion=replace(each.completion, verify_passes=count))
            for each, count in zip(drafted.trajectories, passes, strict=True)
        ),
    )
    assert measured(drafted, group([0.0, 1.0], lengths=[7, 7]))["rollout/accept_length"] == 10 / 4
    assert "rollout/accept_length" not in measured(group([0.0, 1.0]))

    (single,) = group([0.0], lengths=[12]).trajectories
    sequence = single.sequences[0]
    said = tuple(Turn(role, "…", 1, 0.0) for role in ("system", "user", "assistant", "tool", "assistant"))
    counts = {"turns": 2.0, "verify_passes": 4.0}  # requests, each of which samples a first token
    episode = Episode((sequence,), said, Ending.stop, {}, counts)
    of_episode = Group(drafted.prompt, (replace(single, episode=episode),))
    assert measured(of_episode)["rollout/accept_length"] == (12 - 2) / 4

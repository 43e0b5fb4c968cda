"""What a step records, and what failing to record it costs."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from app.checkpoint import folder
from app.checkpoint.run_state import read_state
from app.config.checkpoint import CheckpointConfig
from app.config.placement import PlacementKind
from app.errors import EngineError, RunError, TrainerError
from app.placement import controller as placement_controller
from app.placement.colocate import Colocate
from app.placement.controller import PlacementController
from app.placement.fully_async import FullyAsync
from app.types import MemoryUse
from tests.recovery.test_engine_supervisor import without_threads
from tests.simulation import SimTrainer, World, config, now, run_virtual

CONTROLLERS: dict[PlacementKind, type[PlacementController]] = {
    PlacementKind.colocate: Colocate,
    PlacementKind.fully_async: FullyAsync,
}
BOTH = pytest.mark.parametrize("kind", list(CONTROLLERS))


def play(world: World) -> float:
    """The whole run; its virtual seconds."""

    async def story() -> float:
        context = world.context()
        async with context.supervisor.monitor():
            await CONTROLLERS[world.config.placement.kind](context).run()
        return now()

    return run_virtual(story())


@BOTH
def test_the_best_evaluation_is_kept_although_no_checkpoint_was_due(
    kind: PlacementKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = [0.9, 0.3, 0.7, 0.5, 0.7, 0.6, 0.1]  # of versions 0 to 6; the first is of the untrained model

    async def evaluated(_: object, __: object, ___: object, version: int) -> tuple[dict[str, dict[str, float]], list]:
        return {"one": {"accuracy": accuracies[version]}, "two": {"accuracy": accuracies[version]}}, []

    monkeypatch.setattr(placement_controller, "evaluate", evaluated)
    without_threads(monkeypatch)
    settings = config(kind, max_staleness=0, before_train=True)
    settings.eval.every = 1
    settings.checkpoint = CheckpointConfig(keep=1)
    world = World(settings, tmp_path)
    play(world)
    assert {each.name for each in (tmp_path / "checkpoints").iterdir()} == {"latest", "best", "step_2", "step_6"}
    best = folder.best(tmp_path)
    assert best is not None
    assert (best.name, read_state(best).accuracy) == ("step_2", 0.7)
    assert read_state(tmp_path / "checkpoints" / "step_6").accuracy == 0.1


class Hiccup(SimTrainer):
    """The `nth` measurement of the ranks' memory fails."""

    nth = 8
    measured = 0

    async def memory(self) -> list[MemoryUse]:
        self.measured += 1
        if self.measured == self.nth:
            raise TrainerError("trainer rank 0 failed during memory: OSError: on purpose")
        return await super().memory()


@BOTH
def test_a_measurement_that_fails_costs_a_warning_and_no_step(kind: PlacementKind, tmp_path: Path) -> None:
    world = World(config(kind), tmp_path, trainer=Hiccup(seconds=0.1, finish=0.2))
    play(world)
    assert [line["step"] for line in world.recorder.lines] == [1, 2, 3, 4, 5, 6]
    assert world.trainer.aborts == 0
    (warning,) = world.recorder.warnings
    assert re.search("trainer rank 0 .*memory: OSError: on purpose", warning)
    without = [line["step"] for line in world.recorder.lines if "memory/trainer_rss_mib" not in line]
    assert len(without) <= 1  # the eighth may be a peak of a phase


@BOTH
def test_a_step_that_cannot_be_recorded_ends_the_run_with_its_reason(kind: PlacementKind, tmp_path: Path) -> None:
    world = World(config(kind), tmp_path)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            raise OSError(28, "No space left on device")

    world.recorder.log = log  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"step 3 .*No space left on device"):
        play(world)


def aborts_by_itself(times: int) -> Callable[[str], float]:
    """Each prompt's engine aborts it so often, then samples it in a second."""
    seen: dict[str, int] = {}

    def seconds(prompt_id: str) -> float:
        seen[prompt_id] = seen.get(prompt_id, 0) + 1
        if seen[prompt_id] <= times:
            raise EngineError(f"engine 0 aborted prompt {prompt_id}: out of memory on purpose")
        return 1.0

    return seconds


@BOTH
def test_an_abort_by_the_engine_costs_a_prompt_a_retry_with_a_pause(kind: PlacementKind, tmp_path: Path) -> None:
    quiet = World(config(kind), tmp_path)
    troubled = World(config(kind), tmp_path, aborts_by_itself(2))
    assert play(troubled) > play(quiet) + 6 * 0.75 * (kind is PlacementKind.colocate)
    assert sorted(troubled.trainer.ids) == sorted(quiet.trainer.ids)
    assert sum(line["rollout/aborted_groups"] for line in troubled.recorder.lines) == 0


@BOTH
def test_an_engine_that_aborts_every_time_ends_the_run_after_a_few_requests(
    kind: PlacementKind, tmp_path: Path
) -> None:
    sent: list[str] = []
    always = aborts_by_itself(10**9)

    def seconds(prompt_id: str) -> float:
        sent.append(prompt_id)
        return always(prompt_id)

    world = World(config(kind), tmp_path, seconds)
    sentence = (
        r"^engines refused or aborted prompt sim/\d+@0 3 times \(recovery.max_prompt_retries=2\); last error: "
        r"engine 0 aborted prompt sim/\d+@0: out of memory on purpose$"
    )
    with pytest.raises(EngineError, match=sentence):
        play(world)
    assert len(sent) <= 3 * 8  # max_inflight_groups

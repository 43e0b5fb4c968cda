"""Runs that end before their last step, by their evaluations."""

import json
from pathlib import Path

import pytest

from app.checkpoint.folder import latest
from app.config import RunConfig
from app.config.checkpoint import CheckpointConfig
from app.config.placement import PlacementKind
from app.config.stop import StopConfig
from app.mode import train
from app.mode.train import CONTROLLERS
from app.recovery.resume import resume_training
from app.stop import stop_reason
from app.tracking.recorder import RunFolderRecorder
from tests.checkpoint.test_best import save
from tests.folders import a_run
from tests.folders import composed_by_hydra as composed
from tests.simulation import World, config, virtual, without_threads


@pytest.mark.parametrize(
    ("stop", "accuracies", "stops"),
    [
        (StopConfig(), [0.1, 0.9, 0.1], []),
        (StopConfig(at_accuracy=0.9), [0.95, 0.8, 0.9, 0.91], [2, 3]),  # 0 is before training
        (StopConfig(patience=2), [0.5, 0.4, 0.5, 0.6, 0.6], [2]),  # an equal one is no new best
        (StopConfig(patience=2), [0.1, 0.6, 0.4, 0.5, 0.6], [3, 4]),
        (StopConfig(patience=1, at_accuracy=0.6), [0.1, 0.6, 0.7], [1, 2]),
    ],
)
def test_a_run_stops_at_an_accuracy_or_without_a_new_best(
    stop: StopConfig, accuracies: list[float], stops: list[int]
) -> None:
    seen: dict[int, float] = {}
    found = []
    for step, accuracy in enumerate(accuracies):
        seen[step] = accuracy
        if stop_reason(stop, seen, step=step, last_step=60):
            found.append(step)
    assert found == stops


def test_neither_the_last_step_nor_one_without_an_evaluation_stops_a_run() -> None:
    stop = StopConfig(at_accuracy=0.5)
    assert stop_reason(stop, {10: 0.9}, step=10, last_step=11) is not None
    assert stop_reason(stop, {10: 0.9}, step=10, last_step=10) is None
    assert stop_reason(stop, {10: 0.9}, step=11, last_step=20) is None


@pytest.mark.parametrize(
    ("kind", "stop", "last"),
    [(PlacementKind.colocate, StopConfig(at_accuracy=0.9), 2), (PlacementKind.fully_async, StopConfig(patience=2), 6)],
)
@virtual
async def test_a_run_ends_where_its_evaluations_stop_it_and_saves_that_step(
    kind: PlacementKind, stop: StopConfig, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    settings = config(kind, steps=20, max_staleness=0, every=2)
    settings.checkpoint = CheckpointConfig(every=0, keep=2, export=False)
    settings.stop = stop
    world = World(settings, tmp_path, right=lambda prompt_id, member: True)
    with RunFolderRecorder(settings, tmp_path) as recorder:
        world.recorder = recorder  # type: ignore[assignment]
        context = world.context()
        await CONTROLLERS[kind](context).run()
        await context.checkpoints.wait()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == last
    assert latest(tmp_path) == tmp_path / "checkpoints" / f"step_{last}"
    assert (len(world.trainer.trained), world.trainer.open) == (last, None)


@pytest.mark.parametrize(
    ("status", "checkpoint", "overrides", "finished"),
    [
        ("finished", 4, [], True),
        ("finished", 4, ["steps=90"], True),  # its evaluations would stop it again
        ("finished", 4, ["stop.at_accuracy=0.95"], False),
        ("finished", None, [], True),
        ("interrupted", 4, [], False),  # though its evaluation would stop it
    ],
)
def test_a_run_that_stopped_early_is_finished_until_its_settings_let_it_go_on(
    status: str, checkpoint: int | None, overrides: list[str], finished: bool, tmp_path: Path
) -> None:
    run = a_run(
        tmp_path / "run", "steps=60", "stop.at_accuracy=0.9", step=checkpoint, reached=4, status=status, accuracy=0.92
    )
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "eval/accuracy": 0.92}\n')
    resumption = resume_training(composed(f"resume={run}", *overrides), tmp_path / "new")
    assert resumption.accuracy == (0.92 if finished else None)
    assert resumption.checkpoint == (None if finished else run / "checkpoints" / "step_4")
    if finished:
        assert "stop.at_accuracy=0.9" in resumption.notes[-1]


@pytest.mark.parametrize(("accuracy", "stops"), [(0.8, False), (0.95, True)])
def test_the_summary_says_why_a_run_stopped(
    accuracy: float, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(steps=6, every=2)
    settings.stop = StopConfig(at_accuracy=0.9, patience=4)

    async def trained(_config: RunConfig, _folder: Path, _inputs: None, recorder: RunFolderRecorder, _: None) -> None:
        recorder.log(2, {"time/step": 1.0})
        recorder.log_eval(2, {"eval": {"accuracy": accuracy}})

    monkeypatch.setattr(train, "_train", trained)
    save(tmp_path, [(2, accuracy)])
    train.run(settings, tmp_path, None)  # type: ignore[arg-type]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], "stop/reason" in summary) == ("finished", stops)

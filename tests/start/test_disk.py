"""What a run will write is compared with the free space before anything starts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from app.model.architecture import architecture_of
from app.start.input_checks import disk, free_bytes, plan_disk
from app.start.inputs import CheckStage, RunInputs
from tests.compose import composed
from tests.refusals import refused


def leave(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))


def test_a_run_whose_checkpoints_do_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed()
    model = architecture_of(config.model)
    assert model is not None
    needed = plan_disk(config, model).bytes
    assert needed == 4 * 12 * model.parameters + 4 * model.parameters  # two kept, the best, one being written

    folder = tmp_path / "not" / "made"
    leave(needed, monkeypatch)
    assert len([*disk(RunInputs(config, CheckStage.doctor, folder))]) == 1
    leave(needed - 1, monkeypatch)
    for moment in (CheckStage.doctor, CheckStage.start):
        with refused("hydra.run.dir", folder, " MiB for", "checkpoint.keep"):
            [*disk(RunInputs(config, moment, folder))]

    keeps_nothing = composed("checkpoint.keep=0", "checkpoint.export=false")
    for each in (
        RunInputs(config, CheckStage.start, folder, checkpoint=tmp_path),
        RunInputs(composed("mode=eval"), CheckStage.start, folder),
        RunInputs(keeps_nothing, CheckStage.start, folder),
        RunInputs(config, CheckStage.start),  # a job of a sweep
    ):
        [*disk(each)]


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    usage = shutil.disk_usage("/")

    def disk_usage(folder: Path) -> Any:
        asked.append(folder)
        return usage._replace(free=7)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert free_bytes(tmp_path / "not" / "made") == 7
    assert asked == [tmp_path]

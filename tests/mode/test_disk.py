"""What a run will write is compared with the free space before anything starts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from app.mode.disk import free_bytes, plan_disk, require_space
from app.mode.doctor.check import examine
from app.mode.doctor.finding import CheckStatus
from app.model.architecture import architecture_of
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

    leave(needed, monkeypatch)
    require_space(config, tmp_path / "not" / "made")
    leave(needed - 1, monkeypatch)
    with refused("hydra.run.dir", tmp_path / "not" / "made", " MiB for", "checkpoint.keep"):
        require_space(config, tmp_path / "not" / "made")

    require_space(composed("mode=eval"), tmp_path)
    require_space(composed("checkpoint.keep=0", "checkpoint.export=false"), tmp_path)


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    usage = shutil.disk_usage("/")

    def disk_usage(folder: Path) -> Any:
        asked.append(folder)
        return usage._replace(free=7)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert free_bytes(tmp_path / "not" / "made") == 7
    assert asked == [tmp_path]


def test_the_doctor_looks_at_the_disk_of_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (disk,) = [each for each in examine(composed(), tmp_path / "file") if each.subject == "disk"]
    assert disk.status is CheckStatus.fail
    assert f"{tmp_path / 'file'} cannot be written: {tmp_path / 'file'} is a file" in disk.message

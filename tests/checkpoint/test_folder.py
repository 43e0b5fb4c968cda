"""The checkpoint that a run is resumed from."""

from pathlib import Path

import pytest

from app.checkpoint.folder import intact, latest, newest_intact
from app.errors import CheckpointError, DamagedCheckpoint
from tests.checkpoint.plain_files import DATA, flip_a_byte, save


def test_the_newest_intact_checkpoint_is_found_behind_damaged_ones(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, [1, 2, 3]).folder
    flip_a_byte(checkpoints / "step_3" / DATA)
    (checkpoints / "step_2" / DATA).unlink()
    point = newest_intact(tmp_path)
    assert point is not None
    assert (point.path.name, point.state.step) == ("step_1", 1)
    assert [reason.split(": ")[1].split(" has")[0] for reason in point.damaged] == [DATA, f"{DATA} is missing"]


def test_a_checkpoint_that_latest_names_may_be_missing_altogether(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, [1, 2]).folder
    (checkpoints / "step_2").rename(tmp_path / "lost")
    with pytest.raises(DamagedCheckpoint, match=r"step_2, .*latest"):
        latest(tmp_path)
    point = newest_intact(tmp_path)
    assert point is not None
    assert (point.path.name, len(point.damaged)) == ("step_1", 1)


def test_a_run_without_an_intact_checkpoint_does_not_start_anew(tmp_path: Path) -> None:
    assert newest_intact(tmp_path) is None
    checkpoints = save(tmp_path, [1, 2]).folder
    for name in ("step_1", "step_2"):
        flip_a_byte(checkpoints / name / DATA)
    with pytest.raises(DamagedCheckpoint, match=r"step_2 is damaged: .*no other"):
        newest_intact(tmp_path)


def test_a_damaged_latest_and_an_unfinished_checkpoint_are_refused_with_a_sentence(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, [1]).folder
    (checkpoints / "latest").write_text("\n")
    with pytest.raises(CheckpointError, match=r"latest is damaged: .*resume=<path>"):
        newest_intact(tmp_path)
    with pytest.raises(CheckpointError, match=r"step_2\.tmp"):
        intact(checkpoints / "step_2.tmp")

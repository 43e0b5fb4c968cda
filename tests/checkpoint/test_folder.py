"""The checkpoint that a run is resumed from."""

from pathlib import Path

import pytest

from app.checkpoint.folder import newest_intact
from app.errors import DamagedCheckpoint
from tests.checkpoint.plain_files import DATA, flip_a_byte, save


def test_the_newest_intact_checkpoint_is_found_behind_damaged_ones(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, [1, 2, 3]).folder
    flip_a_byte(checkpoints / "step_3" / DATA)
    (checkpoints / "step_2" / DATA).unlink()
    point = newest_intact(tmp_path)
    assert point is not None
    assert (point.path.name, point.state.step) == ("step_1", 1)
    assert [reason.split(": ")[1].split(" has")[0] for reason in point.damaged] == [DATA, f"{DATA} is missing"]


def test_a_run_without_an_intact_checkpoint_does_not_start_anew(tmp_path: Path) -> None:
    assert newest_intact(tmp_path) is None
    checkpoints = save(tmp_path, [1, 2]).folder
    for name in ("step_1", "step_2"):
        flip_a_byte(checkpoints / name / DATA)
    with pytest.raises(DamagedCheckpoint, match=r"step_2 is damaged: .*no other"):
        newest_intact(tmp_path)

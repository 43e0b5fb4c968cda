"""Every change of a checkpoint's files is found before it is restored; a resume takes the newest intact one."""

import json
from pathlib import Path

import pytest

from app.checkpoint.folder import newest_intact
from app.checkpoint.run_state import STATE, RunState, read_intact, read_state
from app.errors import DamagedCheckpoint
from tests.checkpoint.plain_files import DATA, flip_a_byte, save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path, [1])
    return tmp_path / "checkpoints" / "step_1"


def test_every_file_has_its_size_and_checksum_in_the_state(checkpoint: Path) -> None:
    body = json.loads((checkpoint / STATE).read_text())
    assert (body["format"], body["step"], body["version"]) == (2, 1, 1)
    assert set(body["files"]) == {each.name for each in checkpoint.iterdir()} - {STATE}
    assert body["files"][DATA]["bytes"] == (checkpoint / DATA).stat().st_size
    assert read_intact(checkpoint) == read_state(checkpoint) == RunState(1, 1)


@pytest.mark.parametrize("name", [DATA, ".metadata"])
def test_a_changed_byte_is_found_although_the_size_is_the_same(name: str, checkpoint: Path) -> None:
    flip_a_byte(checkpoint / name)
    assert read_state(checkpoint) == RunState(1, 1)  # sizes alone do not show it
    with pytest.raises(DamagedCheckpoint, match=rf"step_1 .*{name} has checksum"):
        read_intact(checkpoint)


def test_another_size_and_a_missing_file_are_found_without_reading_files(checkpoint: Path) -> None:
    (checkpoint / DATA).write_bytes((checkpoint / DATA).read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"incomplete: __0_0\.distcp has \d+ bytes"):
        read_state(checkpoint)
    (checkpoint / DATA).unlink()
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp is missing"):
        read_state(checkpoint)


def test_a_changed_damaged_or_missing_state_is_found(checkpoint: Path) -> None:
    file = checkpoint / STATE
    file.write_text(file.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json .*checksum"):
        read_state(checkpoint)
    file.write_text("{")
    with pytest.raises(DamagedCheckpoint, match=r"state\.json is damaged"):
        read_state(checkpoint)
    file.unlink()
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        read_state(checkpoint)


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

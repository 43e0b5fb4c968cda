"""Every change of a checkpoint's files is found before it is restored."""

import json
from pathlib import Path

import pytest

from app.checkpoint.run_state import STATE, RunState, read_intact, read_state
from app.errors import CheckpointError, DamagedCheckpoint
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


def test_a_changed_digit_of_the_state_is_found(checkpoint: Path) -> None:
    file = checkpoint / STATE
    file.write_text(file.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json .*checksum"):
        read_state(checkpoint)


def test_format_1_is_read_without_checksums_and_an_unknown_one_is_refused(checkpoint: Path) -> None:
    sizes = {name: (checkpoint / name).stat().st_size for name in (DATA, ".metadata")}
    old = {"format": 1, "step": 1, "version": 1, "extra": {}, "model": {}, "files": sizes}
    (checkpoint / STATE).write_text(json.dumps(old))
    flip_a_byte(checkpoint / DATA)
    assert read_intact(checkpoint) == RunState(1, 1)
    (checkpoint / DATA).write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp has 0 bytes"):
        read_intact(checkpoint)

    (checkpoint / STATE).write_text(json.dumps(old | {"format": 3}))
    with pytest.raises(CheckpointError, match="format 3") as raised:
        read_intact(checkpoint)
    assert not isinstance(raised.value, DamagedCheckpoint)

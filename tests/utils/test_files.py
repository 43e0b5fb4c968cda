"""File operations that lose nothing."""

from pathlib import Path

from app.utils.files import set_aside


def test_what_is_set_aside_never_replaces_what_was_set_aside_before(tmp_path: Path) -> None:
    moved = []
    for content in "abc":
        (tmp_path / "step_4").mkdir()
        (tmp_path / "step_4" / "file").write_text(content)
        moved.append(set_aside(tmp_path / "step_4", tmp_path / "aside"))
    assert [each.name for each in moved] == ["step_4", "step_4.2", "step_4.3"]
    assert [(each / "file").read_text() for each in moved] == ["a", "b", "c"]
    assert not (tmp_path / "step_4").exists()

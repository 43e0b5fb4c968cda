"""Custom rewards."""

from pathlib import Path

import pytest

from tests.reward.scorers import WriteReward


@pytest.fixture
def custom_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteReward:
    """Write a custom reward module, put it on the path, and return its name."""

    def write(source: str) -> str:
        name = f"custom_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    return write

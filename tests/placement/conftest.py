"""The model of the placements whose trainer is a real one."""

from pathlib import Path

import pytest

from tests.model.support import save_qwen3


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))

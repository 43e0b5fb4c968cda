"""Small trainers compute faster on one thread, and may share their checkpoint."""

from pathlib import Path

import pytest

from tests.model.support import save_qwen3


@pytest.fixture(scope="module", autouse=True)
def on_one_thread(one_thread: None) -> None: ...


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"), tied=False)

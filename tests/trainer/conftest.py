"""What the tests of a train step share: a small random Qwen3, another one as its reference, and groups of it."""

from pathlib import Path

import pytest

from app.types import ScoredGroup
from tests.model.support import save_qwen3
from tests.trainer.support import sampled, scored_groups


@pytest.fixture(scope="module", autouse=True)
def on_one_thread(one_thread: None) -> None: ...


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("reference"), seed=1)


@pytest.fixture(scope="session")
def groups(path: Path) -> list[ScoredGroup]:
    """Eight groups of four, sampled from the policy with some mismatch."""
    return sampled(path, scored_groups(8))

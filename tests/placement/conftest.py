"""Runs of the application that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.placement.runs import Run


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run with these overrides; several in one test are attempts of the same run."""
    runs: list[Run] = []

    def start_run(*overrides: str, module: str = "app") -> Run:
        runs.append(Run(tmp_path, *overrides, module=module))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()

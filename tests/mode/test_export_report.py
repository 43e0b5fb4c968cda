"""`mode=export` and `mode=report` write into a run's folder, and only while no other process does."""

import os
import socket
from pathlib import Path

import pytest

from app.config import RunConfig
from app.config.model import ModelConfig
from app.mode import export
from app.recovery.run_lock import FolderInUse, run_lock
from tests.checkpoint.test_export import trained
from tests.folders import content
from tests.model.support import save_qwen3


def test_a_run_that_is_being_written_is_not_exported_into(tmp_path: Path, one_thread: None) -> None:
    source = save_qwen3(tmp_path / "source")
    run = tmp_path / "run"
    trained(source, run)
    config = RunConfig(model=ModelConfig(path=str(source)))
    with run_lock(run):
        before = content(run)
        with pytest.raises(FolderInUse, match=rf"run is in use: process {os.getpid()} on {socket.gethostname()} is"):
            export.export_run(config, run)
        assert content(run) == before
    assert export.export_run(config, run) == run / "export"

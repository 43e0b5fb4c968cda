"""Who may write into a run's folder."""

import os
import socket
from pathlib import Path

import pytest

from app.recovery.run_lock import LOCK, FolderInUse, run_lock
from tests.folders import content


def test_a_second_process_is_refused_with_the_name_of_the_first_and_changes_nothing(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        before = content(tmp_path)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(FolderInUse) as refused, run_lock(tmp_path):
            raise AssertionError("two drivers")
        assert str(tmp_path) in str(refused.value)
        assert str(holder) in str(refused.value)
        assert content(tmp_path) == before


def test_a_lock_that_is_released_is_taken_again_under_the_name_of_the_next(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 1 on a machine with a long name\n")
    for _ in range(2):
        with run_lock(tmp_path):
            assert (tmp_path / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"

"""The checkpoint with the highest accuracy is kept, whatever happens to the others."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from app.checkpoint.folder import best, complete, find, latest, named, newest_intact
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState, read_intact
from tests.checkpoint.plain_files import names, save_states

SAVED = ((10, 0.5), (20, 0.8), (30, None), (40, 0.6), (50, 0.8))  # step, accuracy


def save(folder: Path, saved: Sequence[tuple[int, float | None]] = SAVED, keep: int = 2) -> CheckpointManager:
    states = [RunState(step, step, accuracy=accuracy) for step, accuracy in saved]
    return save_states(CheckpointManager(folder, keep, keep_best=True), states)


def test_the_best_is_kept_besides_the_newest_and_of_equal_ones_the_first(tmp_path: Path) -> None:
    folder = save(tmp_path).folder
    assert names(tmp_path) == {"latest", "best", "step_20", "step_40", "step_50"}
    assert best(tmp_path) == named(folder / "best") == find(folder / "best") == folder / "step_20"
    assert latest(tmp_path) == named(folder / "latest") == folder / "step_50"


def test_a_resumed_run_knows_the_best_so_far(tmp_path: Path) -> None:
    folder = save(tmp_path).folder
    resumed = CheckpointManager(tmp_path, keep=2, keep_best=True)
    resumed.rewind(folder / "step_50")
    assert [resumed.is_best(accuracy) for accuracy in (None, 0.7, 0.8, 0.81)] == [False, False, False, True]
    assert best(tmp_path) == folder / "step_20"


WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}


def killed_at(number: int, folder: Path) -> bool:
    """Save and rewind in a process that ends at once at its n-th change of a file; return whether it got that far."""
    pid = os.fork()
    if not pid:
        changes = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal changes
            changes += event in WRITES and str(folder) in str(arguments[0])
            if changes == number:
                os._exit(9)

        sys.addaudithook(count)
        code = 1
        try:
            checkpoints = save(folder, [(1, 0.5), (2, 0.8), (3, 0.6), (4, 0.9)])
            checkpoints.rewind(folder / "checkpoints" / "step_3")
            code = 0
        finally:
            os._exit(code)

    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 9


def test_a_kill_at_any_change_of_a_file_leaves_a_best_that_is_complete(tmp_path: Path) -> None:
    number = 1
    while killed_at(number, folder := tmp_path / str(number)):
        for path in (best(folder), latest(folder)):
            assert path is None or read_intact(path).step == int(path.name[5:])

        point = newest_intact(folder)
        if point is not None:
            resumed = CheckpointManager(folder, keep=2, keep_best=True)
            resumed.rewind(point.path)
            there = [read_intact(checkpoint).accuracy or 0 for checkpoint in complete(folder / "checkpoints")]
            top = best(folder)
            assert top is not None
            assert read_intact(top).accuracy == max(there)
        number += 1
    assert number > 40

"""What becomes of a checkpoint whose write is cut short, and of those that a run goes back before."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.checkpoint import manager
from app.checkpoint.folder import latest, newest_intact
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState, read_intact
from app.errors import CheckpointError, RunError
from app.placement.colocate import Colocate
from app.utils import files
from tests.checkpoint.plain_files import PlainFiles, names, save
from tests.folders import ROOT
from tests.simulation import World, config

DEADLINE_S = 60.0


class Gate:
    """A function that blocks its thread at its first call, until `go` is set."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        if not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(DEADLINE_S)
        return self.function(*arguments)


async def test_a_commit_that_is_cancelled_is_finished_and_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=1)
    await checkpoints.save(PlainFiles(), RunState(1, 1))
    await checkpoints.wait()

    flush = Gate(files.sync)
    monkeypatch.setattr(files, "sync", flush)
    await checkpoints.save(PlainFiles(), RunState(2, 2))
    assert await asyncio.to_thread(flush.reached.wait, DEADLINE_S)
    assert names(tmp_path) == {"latest", "step_1", "step_2.tmp"}

    settling = asyncio.create_task(checkpoints.settle(0))  # cancels the write
    done, _ = await asyncio.wait({settling}, timeout=0.05)
    assert not done
    assert names(tmp_path) == {"latest", "step_1", "step_2.tmp"}  # nobody cleans up under the thread
    flush.go.set()
    assert await settling is None
    assert checkpoints.committed_step == 2
    assert names(tmp_path) == {"latest", "step_2"}
    point = newest_intact(tmp_path)
    assert point is not None
    assert (point.path.name, point.damaged) == ("step_2", ())


BLOCKED = """
import asyncio, sys, threading
from pathlib import Path
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState
from app.utils import files
from tests.checkpoint.plain_files import PlainFiles

async def commit() -> None:
    checkpoints = CheckpointManager(Path(sys.argv[1]), keep=1, timeout_s=0.5)
    files.sync = lambda *_: threading.Event().wait()
    await checkpoints.save(PlainFiles(), RunState(1, 1))
    await checkpoints.wait()

asyncio.run(commit())
"""


def test_storage_that_blocks_for_ever_does_not_keep_the_process(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        f"CheckpointError: checkpoint {tmp_path}/checkpoints/step_1 was not written within 0 s\n"
    )


async def test_every_access_to_storage_has_a_deadline_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def block(*_: Any) -> None:
        answers.wait(DEADLINE_S)

    settings = config()
    settings.trainer.timeout_s = 0.1
    world = World(settings, tmp_path / "run")
    world.recorder.flush = block  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"metrics of step 1 were not flushed .*trainer\.timeout_s"):
        await Colocate(world.context(), 1).save()

    checkpoints = CheckpointManager(tmp_path, keep=1, timeout_s=0.1)
    monkeypatch.setattr(manager, "newest_intact", block)
    with pytest.raises(CheckpointError, match="checkpoints was not read within"):
        await checkpoints.resume_point()
    monkeypatch.setattr(files, "remove", block)
    with pytest.raises(CheckpointError, match="step_1 cannot be started: its folder was not created within"):
        await checkpoints.save(PlainFiles(), RunState(1, 1))
    answers.set()


def test_rewind_sets_later_checkpoints_aside_and_deletes_none(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, [20, 40, 60])
    folder = checkpoints.folder
    assert checkpoints.rewind(folder / "step_20") == [folder / "aside" / "step_40", folder / "aside" / "step_60"]
    assert (latest(tmp_path), checkpoints.committed_step) == (folder / "step_20", 20)
    assert names(tmp_path) == {"latest", "step_20", "aside"}

    save(tmp_path, [40])  # again, on another way
    assert checkpoints.rewind(folder / "step_20") == [folder / "aside" / "step_40.2"]
    aside = sorted(each.name for each in (folder / "aside").iterdir())
    assert aside == ["step_40", "step_40.2", "step_60"]
    assert all(read_intact(folder / "aside" / name).step == int(name[5:7]) for name in aside)

    save(tmp_path, [30], keep=1)
    assert names(tmp_path) == {"latest", "step_30", "aside"}  # `keep` counts and deletes none that was set aside
    assert len(list((folder / "aside").iterdir())) == 3

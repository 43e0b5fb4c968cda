"""The checkpoints of a run: each is complete or absent, whatever fails."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.checkpoint.folder import latest
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState, read_intact, read_state
from app.config.trainer import TrainerConfig
from app.errors import CheckpointError
from tests.checkpoint.plain_files import names
from tests.checkpoint.resume_scenarios import trainer_of
from tests.checkpoint.saves import DEADLINE_S, OneProcess
from tests.refusals import refused
from tests.trainer.support import Scenario, scored_groups, train
from tests.trainer.test_step import GRPO


@pytest.fixture(scope="module")
def trainer(path: Path) -> OneProcess:
    scenario = Scenario(GRPO, scored_groups(4), trainer=TrainerConfig(lr=1e-3))
    step, state = trainer_of(path, scenario)
    train(step, scenario)
    return OneProcess(state)


async def saved(checkpoints: CheckpointManager, trainer: OneProcess, *steps: int) -> list[Path]:
    paths = [await checkpoints.save(trainer, state_of(step)) for step in steps]
    await checkpoints.wait()
    return paths


def state_of(step: int) -> RunState:
    return RunState(step, step, extra={"cursor": {"epoch": 0, "returned": ["a/1@0"]}}, model={"vocab_size": 101})


def test_a_saved_state_can_be_read_back(trainer: OneProcess, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2)
    assert latest(tmp_path) is None
    (path,) = asyncio.run(saved(checkpoints, trainer, 7))
    assert latest(tmp_path) == path == tmp_path / "checkpoints" / "step_7"
    assert read_intact(path) == state_of(7)
    metrics = checkpoints.metrics
    assert metrics["checkpoint/bytes"] > trainer.state.bytes
    assert 0 < metrics["checkpoint/blocked_s"] < 60
    assert 0 < metrics["checkpoint/write_s"] < 60


async def test_the_previous_checkpoint_stays_until_the_new_one_is_the_latest(
    trainer: OneProcess, tmp_path: Path
) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=1)
    (first,) = await saved(checkpoints, trainer, 1)
    trainer.gate.clear()
    second = await checkpoints.save(trainer, state_of(2))
    assert names(tmp_path) == {"latest", "step_1", "step_2.tmp"}
    assert latest(tmp_path) == first
    third = asyncio.create_task(checkpoints.save(trainer, state_of(3)))
    await asyncio.sleep(0.05)
    assert not third.done()  # waits for the second
    trainer.gate.set()
    assert await asyncio.wait_for(third, DEADLINE_S) == second.with_name("step_3")
    assert latest(tmp_path) == second
    await checkpoints.wait()
    assert names(tmp_path) == {"latest", "step_3"}


# --- failures raise one sentence and leave the previous checkpoint untouched


@pytest.fixture
def small_files() -> Iterator[None]:
    """Restore the limit of file sizes. A test lowers it so that writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(
    small_files: None, trainer: OneProcess, tmp_path: Path
) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2)
    (first,) = await saved(checkpoints, trainer, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    await checkpoints.save(trainer, state_of(2))
    with pytest.raises(CheckpointError, match=r"step_2.* rank 0: ") as raised:
        await checkpoints.wait()
    assert "\n" not in str(raised.value)
    assert names(tmp_path) == {"latest", "step_1"}
    assert latest(tmp_path) == first
    assert read_state(first) == state_of(1)
    await checkpoints.wait()  # raised only once


def test_a_lack_of_disk_space_is_detected_before_anything_is_written(
    trainer: OneProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2)
    (first,) = asyncio.run(saved(checkpoints, trainer, 1))
    usage = __import__("shutil").disk_usage(tmp_path)
    monkeypatch.setattr("app.checkpoint.manager.shutil.disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(CheckpointError, match=r"step_2 .*98 KiB"):
        asyncio.run(checkpoints.save(trainer, state_of(2)))
    assert (latest(tmp_path), names(tmp_path)) == (first, {"latest", "step_1"})
    with refused("checkpoint.keep", 2, "3 checkpoints of 1.0 MiB", " KiB available"):
        checkpoints.prepare(2**20)
    with refused("checkpoint.keep", 2, "4 checkpoints of 1024.0 GiB", "checkpoint.keep_best=false"):
        CheckpointManager(tmp_path, keep=2, keep_best=True).prepare(2**40)


def killed_while_saving(path: Path, folder: Path, after: int) -> int:
    """Kill a process in the middle of a save, after some saves. Returns the last step it printed as committed."""
    command = [sys.executable, "-m", "tests.checkpoint.saves", str(path), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for _ in range(after):
            committed = int(process.stdout.readline())
        deadline = time.monotonic() + DEADLINE_S
        while not any((folder / "checkpoints").glob("step_*.tmp/*")):
            assert time.monotonic() < deadline
        os.kill(process.pid, signal.SIGKILL)
        return max([committed, *map(int, process.stdout.read().split())])
    finally:
        process.kill()
        process.wait(30)


def assert_latest_is_complete(path: Path, folder: Path, committed: int) -> None:
    checkpoint = latest(folder)
    assert checkpoint is not None
    # The kill may have come between a commit and its print.
    assert read_intact(checkpoint).step in (committed, committed + 1)
    _, state = trainer_of(path, Scenario(GRPO, [], trainer=TrainerConfig()))
    state.restore(checkpoint)
    assert state.optimizer.updates == 1
    CheckpointManager(folder, keep=2).prepare(state.bytes)
    assert not list((folder / "checkpoints").glob("*.tmp"))


def test_kill_9_in_the_middle_of_a_write_leaves_the_latest_complete(path: Path, tmp_path: Path) -> None:
    assert_latest_is_complete(path, tmp_path, killed_while_saving(path, tmp_path, after=2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_leave_the_latest_whole(path: Path, tmp_path: Path) -> None:
    for each in range(20):
        assert_latest_is_complete(path, tmp_path, killed_while_saving(path, tmp_path, after=1 + each % 4))

"""A checkpoint is complete or absent, and a restored trainer continues as if it had never stopped."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from app.checkpoint.folder import latest
from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState, read_intact, read_state, require_model
from app.config.trainer import Optimizer, TrainerConfig
from app.errors import CheckpointError
from app.trainer.checkpoint_state import ChecksummedFiles
from app.types import ScoredGroup
from app.utils.files import crc32_of
from tests.checkpoint.resume_scenarios import RunResult, on_two_ranks, run_and_save, run_resumed, trainer_of
from tests.checkpoint.saves import DEADLINE_S, OneProcess
from tests.model.support import relative, save_qwen3, save_qwen35
from tests.refusals import refused
from tests.trainer.ranks import run_on
from tests.trainer.support import Scenario, full, parameters, sampled, scored_groups, train
from tests.trainer.test_step import GRPO

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"), tied=False)


@pytest.fixture(scope="module")
def groups(path: Path) -> list[ScoredGroup]:
    return sampled(path, scored_groups(4))


# --- on disk


def test_every_file_of_a_checkpoint_is_flushed_to_disk_at_its_full_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the short ones: torch flushes a file before the end of it has left the buffer."""
    flushed: dict[int, int] = {}  # inode → bytes at its last flush
    fsync = os.fsync

    def recorded(handle: int) -> None:
        fsync(handle)
        flushed[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    monkeypatch.setattr(os, "fsync", recorded)
    writer = dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0)
    writer.fs = ChecksummedFiles()
    dcp.save({"long": torch.zeros(100_000), "short": torch.zeros(2)}, storage_writer=writer, no_dist=True)

    written = {file.name: file.stat() for file in tmp_path.iterdir()}
    assert written.keys() == {".metadata", "__0_0.distcp"}
    assert {name: flushed.get(stat.st_ino) for name, stat in written.items()} == {
        name: stat.st_size for name, stat in written.items()
    }


# --- the ranks' share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `results` has one checkpoint of one rank, `one`, and one of two ranks, `two`."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def results(path: Path, groups: list[ScoredGroup], folder: Path) -> dict[str, RunResult]:
    one, two = folder / "one", folder / "two"
    return {
        "1": run_and_save(None, path, groups, one),
        "1 to 1": run_resumed(None, path, groups, one),
        **run_on(2, on_two_ranks, folder / "results.pt", path, groups, one, two),
        "2 to 1": run_resumed(None, path, groups, two),
    }


@pytest.mark.parametrize(("continued", "original"), [("1 to 1", "1"), ("2 to 2", "2")])
def test_a_restored_trainer_continues_bit_for_bit(continued: str, original: str, results: dict[str, RunResult]) -> None:
    one, other = results[continued], results[original]
    for version, metrics in one.metrics.items():
        exact = {name: value for name, value in metrics.items() if not name.startswith(("time/", "trainer/"))}
        assert exact == {name: other.metrics[version][name] for name in exact}
    for name, parameter in other.after.items():
        assert torch.equal(one.saved[name], other.saved[name]), name
        assert torch.equal(one.after[name], parameter), name
    assert one.numbers == other.numbers


@pytest.mark.parametrize(("continued", "original"), [("1 to 2", "1"), ("2 to 1", "2")])
def test_another_number_of_ranks_continues_the_same_losses(
    continued: str, original: str, results: dict[str, RunResult]
) -> None:
    one, other = results[continued], results[original]
    for version, metrics in one.metrics.items():
        for name in ("loss/policy", "loss/total", "grad_norm", "lr", "entropy", "mismatch/kl"):
            assert metrics[name] == pytest.approx(other.metrics[version][name], rel=1e-4, abs=1e-6), (version, name)
    for name, parameter in other.saved.items():
        assert torch.equal(one.saved[name], parameter), name
        assert relative(one.after[name], other.after[name]) < 1e-5, name


def test_training_continues_while_a_checkpoint_is_written(results: dict[str, RunResult]) -> None:
    """The files hold the captured state, although the parameters changed before they were written."""
    for name in ("1", "2"):
        moved = [not torch.equal(results[name].saved[each], after) for each, after in results[name].after.items()]
        assert all(moved)
    assert results["1"].metrics[3]["lr"] < results["1"].metrics[4]["lr"]  # still in warm-up


@pytest.mark.parametrize(("ranks", "name", "files"), [("1", "one", 2), ("2", "two", 3)])
def test_the_ranks_return_the_checksum_of_every_file(
    ranks: str, name: str, files: int, results: dict[str, RunResult], folder: Path
) -> None:
    written = sorted((folder / name).iterdir())
    assert len(written) == files  # one of each rank, and the metadata
    expected = dict(zip([file.name for file in written], crc32_of(written), strict=True))
    assert results[ranks].checksums == expected


def test_offloaded_tensors_are_captured_from_their_host_copy(path: Path, tmp_path: Path) -> None:
    """The tensors themselves hold garbage; `copy` finds their content in host memory."""
    step, state = trainer_of(path, Scenario(GRPO, []))
    host = {parameter.data_ptr(): parameter.detach().clone() for parameter in step.model.parameters()}
    before = parameters(step.model)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.fill_(float("nan"))
    state.capture(lambda tensor: host[tensor.data_ptr()].clone())
    state.write(tmp_path)
    state.restore(tmp_path)
    assert all(torch.equal(full(parameter), before[name]) for name, parameter in parameters(step.model).items())


def test_a_checkpoint_from_before_the_first_update_restores_an_optimizer_without_state(
    path: Path, groups: list[ScoredGroup], tmp_path: Path
) -> None:
    scenario = Scenario(GRPO, groups, trainer=TrainerConfig(lr=1e-3))
    step, state = trainer_of(path, scenario)
    state.capture()
    state.write(tmp_path)
    first = train(step, scenario)
    state.restore(tmp_path)
    assert (step.optimizer.updates, dict(step.optimizer.torch_optimizer.state)) == (0, {})
    assert train(step, scenario).metrics["loss/policy"] == first.metrics["loss/policy"]


def test_the_predicted_bytes_are_those_of_the_tensors(path: Path, groups: list[ScoredGroup]) -> None:
    scenario = Scenario(GRPO, groups, trainer=TrainerConfig())
    step, state = trainer_of(path, scenario)
    train(step, scenario)
    numbers = sum(parameter.numel() for parameter in step.model.parameters())
    assert state.bytes == 12 * numbers  # float32: parameter and two moments
    assert 0 < state.capture() - state.bytes < 40_000  # random state, update counts


@pytest.mark.parametrize(
    ("model", "trainer", "sentence"),
    [
        ("qwen3.5", "adamw", "model.embed_tokens.weight is (101, 32)"),
        ("tied", "adamw", "lm_head.weight is (101, 32)"),
        ("same", "sgd", "trainer.optimizer=sgd"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(
    model: str, trainer: str, sentence: str, path: Path, tmp_path: Path
) -> None:
    adamw = Scenario(GRPO, [], trainer=TrainerConfig())
    _, saved = trainer_of(path, adamw)
    saved.capture()
    saved.write(tmp_path / "saved")
    makers = {"qwen3.5": save_qwen35, "tied": save_qwen3, "same": lambda _: path}
    scenario = replace(adamw, trainer=replace(adamw.trainer, optimizer=Optimizer[trainer]))
    step, state = trainer_of(makers[model](tmp_path / "other"), scenario)
    before = parameters(step.model)
    with pytest.raises(CheckpointError) as raised:
        state.restore(tmp_path / "saved")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(now, before[name]) for name, now in parameters(step.model).items())


# --- the checkpoints of a run


@pytest.fixture(scope="module")
def trainer(path: Path, groups: list[ScoredGroup]) -> OneProcess:
    scenario = Scenario(GRPO, groups, trainer=TrainerConfig(lr=1e-3))
    step, state = trainer_of(path, scenario)
    train(step, scenario)
    return OneProcess(state)


async def saved(checkpoints: CheckpointManager, trainer: OneProcess, *steps: int) -> list[Path]:
    paths = [await checkpoints.save(trainer, state_of(step)) for step in steps]
    await checkpoints.wait()
    return paths


def state_of(step: int) -> RunState:
    return RunState(step, step, extra={"cursor": {"epoch": 0, "returned": ["a/1@0"]}}, model={"vocab_size": 101})


def names(folder: Path) -> set[str]:
    return {each.name for each in (folder / "checkpoints").iterdir()}


def test_a_saved_state_can_be_read_back(trainer: OneProcess, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2)
    assert checkpoints.latest() is None
    (path,) = asyncio.run(saved(checkpoints, trainer, 7))
    assert checkpoints.latest() == path == tmp_path / "checkpoints" / "step_7"
    assert read_intact(path) == state_of(7)
    metrics = checkpoints.metrics
    assert metrics["checkpoint/bytes"] > trainer.state.bytes
    assert 0 < metrics["checkpoint/blocked_s"] < 60
    assert 0 < metrics["checkpoint/write_s"] < 60


def test_only_the_newest_checkpoints_are_kept(trainer: OneProcess, tmp_path: Path) -> None:
    asyncio.run(saved(CheckpointManager(tmp_path, keep=2), trainer, 8, 9, 10, 11))
    assert names(tmp_path) == {"latest", "step_10", "step_11"}


async def test_the_previous_checkpoint_stays_until_the_new_one_is_the_latest(
    trainer: OneProcess, tmp_path: Path
) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=1)
    (first,) = await saved(checkpoints, trainer, 1)
    trainer.gate.clear()
    second = await checkpoints.save(trainer, state_of(2))
    assert names(tmp_path) == {"latest", "step_1", "step_2.tmp"}
    assert checkpoints.latest() == first
    third = asyncio.create_task(checkpoints.save(trainer, state_of(3)))
    await asyncio.sleep(0.05)
    assert not third.done()  # waits for the second
    trainer.gate.set()
    assert await asyncio.wait_for(third, DEADLINE_S) == second.with_name("step_3")
    assert checkpoints.latest() == second
    await checkpoints.wait()
    assert names(tmp_path) == {"latest", "step_3"}


def test_a_committed_step_is_not_written_again(trainer: OneProcess, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2)
    (path,) = asyncio.run(saved(checkpoints, trainer, 4))
    inode = path.stat().st_ino
    asyncio.run(saved(checkpoints, trainer, 4))
    assert path.stat().st_ino == inode


def test_prepare_removes_unfinished_checkpoints(trainer: OneProcess, tmp_path: Path) -> None:
    unfinished = tmp_path / "checkpoints" / "step_3.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    checkpoints = CheckpointManager(tmp_path, keep=2)
    assert checkpoints.latest() is None
    checkpoints.prepare(trainer.state.bytes)
    assert names(tmp_path) == set()


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
    assert checkpoints.latest() == first
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
    assert (checkpoints.latest(), names(tmp_path)) == (first, {"latest", "step_1"})
    with refused("checkpoint.keep", 2, "3 checkpoints of 1.0 MiB", " KiB available"):
        checkpoints.prepare(2**20)
    with refused("checkpoint.keep", 2, "4 checkpoints of 1024.0 GiB", "checkpoint.keep_best=false"):
        CheckpointManager(tmp_path, keep=2, keep_best=True).prepare(2**40)


def test_a_read_only_folder_is_refused_before_the_run(trainer: OneProcess) -> None:
    folder = Path("/sys/kernel")  # read-only even for root
    with refused("hydra.run.dir", folder, "/sys/kernel/checkpoints"):
        CheckpointManager(folder, keep=2).prepare(0)
    with pytest.raises(CheckpointError, match="/sys/kernel/checkpoints/step_1 "):
        asyncio.run(CheckpointManager(folder, keep=2).save(trainer, state_of(1)))


def test_a_damaged_checkpoint_is_named_before_anything_is_restored(trainer: OneProcess, tmp_path: Path) -> None:
    (path,) = asyncio.run(saved(CheckpointManager(tmp_path, keep=2), trainer, 1))
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(
        content[:middle] + bytes(each ^ 0x41 for each in content[middle : middle + 4096]) + content[middle + 4096 :]
    )
    with pytest.raises(CheckpointError, match=r"damaged: __0_0\.distcp has checksum"):
        read_intact(path)
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"incomplete: __0_0\.distcp has \d+ bytes"):
        read_state(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        read_state(path)
    file.write_bytes(content)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        read_state(path)
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        read_state(path)


def test_an_unreadable_file_raises_one_sentence(trainer: OneProcess, path: Path, tmp_path: Path) -> None:
    (saved_at,) = asyncio.run(saved(CheckpointManager(tmp_path, keep=2), trainer, 1))
    for name in (".metadata", "__0_0.distcp"):
        file = saved_at / name
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        _, other = trainer_of(path, Scenario(GRPO, [], trainer=TrainerConfig()))
        with pytest.raises(CheckpointError, match=r"checkpoint .*step_1 ") as raised:
            other.restore(saved_at)
        assert "\n" not in str(raised.value)
        file.write_bytes(content)


def test_a_checkpoint_of_another_model_is_refused_with_the_difference() -> None:
    state, path = RunState(1, 1, model={"vocab_size": 101, "source": "/old/place"}), Path("step_1")
    require_model(state, {"vocab_size": 101, "source": "/new/place"}, path)
    with pytest.raises(CheckpointError, match=r"step_1 .*vocab_size is 101"):
        require_model(state, {"vocab_size": 7}, path)


# --- kill -9


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

"""A checkpoint is whole or not there, and a trainer restored from one continues as if it had never stopped."""

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

from app.checkpoint.manager import Checkpoints, RunState, latest, read_state, require_model
from app.config import trainer as schema
from app.errors import CheckpointError, ConfigError
from app.types import ScoredGroup
from tests.checkpoint.resume_scenarios import Lineage, from_a_checkpoint, from_the_start, on_two_ranks, trainer_of
from tests.checkpoint.saves import DEADLINE_S, OneProcess
from tests.model.support import relative, save_qwen3, save_qwen35
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


# --- the state of the ranks


@pytest.fixture(scope="module")
def lineages(path: Path, groups: list[ScoredGroup], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lineage]:
    folder = tmp_path_factory.mktemp("lineages")
    one, two = folder / "one", folder / "two"
    return {
        "1": from_the_start(None, path, groups, one),
        "1 to 1": from_a_checkpoint(None, path, groups, one),
        **run_on(2, on_two_ranks, folder / "results.pt", path, groups, one, two),
        "2 to 1": from_a_checkpoint(None, path, groups, two),
    }


@pytest.mark.parametrize(("continued", "original"), [("1 to 1", "1"), ("2 to 2", "2")])
def test_a_restored_trainer_continues_bit_for_bit(continued: str, original: str, lineages: dict[str, Lineage]) -> None:
    one, other = lineages[continued], lineages[original]
    for version, metrics in one.metrics.items():
        exact = {name: value for name, value in metrics.items() if not name.startswith(("time/", "trainer/"))}
        assert exact == {name: other.metrics[version][name] for name in exact}
    for name, parameter in other.after.items():
        assert torch.equal(one.saved[name], other.saved[name]), name
        assert torch.equal(one.after[name], parameter), name
    assert one.numbers == other.numbers


@pytest.mark.parametrize(("continued", "original"), [("1 to 2", "1"), ("2 to 1", "2")])
def test_another_number_of_ranks_continues_the_same_losses(
    continued: str, original: str, lineages: dict[str, Lineage]
) -> None:
    one, other = lineages[continued], lineages[original]
    for version, metrics in one.metrics.items():
        for name in ("loss/policy", "loss/total", "grad_norm", "lr", "entropy", "mismatch/kl"):
            assert metrics[name] == pytest.approx(other.metrics[version][name], rel=1e-4, abs=1e-6), (version, name)
    for name, parameter in other.saved.items():
        assert torch.equal(one.saved[name], parameter), name
        assert relative(one.after[name], other.after[name]) < 1e-5, name


def test_training_goes_on_while_a_checkpoint_is_written(lineages: dict[str, Lineage]) -> None:
    """What was captured is what is in the files, though the parameters moved on before they were written."""
    for name in ("1", "2"):
        moved = [not torch.equal(lineages[name].saved[each], after) for each, after in lineages[name].after.items()]
        assert all(moved)
    assert lineages["1"].metrics[3]["lr"] < lineages["1"].metrics[4]["lr"]  # the schedule was under way


def test_tensors_that_a_part_took_away_are_captured_where_they_are(path: Path, tmp_path: Path) -> None:
    """As memory savers leave them: the tensor's own memory holds nothing, its content is somewhere on the host."""
    step, state = trainer_of(path, Scenario(GRPO, []))
    kept = {parameter.data_ptr(): parameter.detach().clone() for parameter in step.model.parameters()}
    before = parameters(step.model)
    state.copy = lambda tensor: kept[tensor.data_ptr()].clone()
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.fill_(float("nan"))
    state.capture()
    state.write(tmp_path)
    state.restore(tmp_path)
    assert all(torch.equal(full(parameter), before[name]) for name, parameter in parameters(step.model).items())


def test_a_checkpoint_of_before_the_first_update_brings_an_optimizer_without_state(
    path: Path, groups: list[ScoredGroup], tmp_path: Path
) -> None:
    scenario = Scenario(GRPO, groups, trainer=schema.TrainerConfig(lr=1e-3))
    step, state = trainer_of(path, scenario)
    state.capture()
    state.write(tmp_path)
    first = train(step, scenario)
    state.restore(tmp_path)
    assert (step.optimizer.updates, dict(step.optimizer.torch.state)) == (0, {})
    assert train(step, scenario).metrics["loss/policy"] == first.metrics["loss/policy"]


def test_the_bytes_said_before_are_those_of_the_tensors(path: Path, groups: list[ScoredGroup]) -> None:
    scenario = Scenario(GRPO, groups, trainer=schema.TrainerConfig())
    step, state = trainer_of(path, scenario)
    train(step, scenario)
    numbers = sum(parameter.numel() for parameter in step.model.parameters())
    assert state.bytes == 12 * numbers  # float32: the parameter and two moments
    assert 0 < state.capture() - state.bytes < 40_000  # random numbers, counts of updates


@pytest.mark.parametrize(
    ("model", "trainer", "sentence"),
    [
        ("qwen3.5", "adamw", "is of another model: model.embed_tokens.weight is (101, 32) and not"),
        ("tied", "adamw", "is of another model: lm_head.weight is (101, 32) and not in this model"),
        ("same", "sgd", "was made with another optimizer than trainer.optimizer=sgd"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(
    model: str, trainer: str, sentence: str, path: Path, tmp_path: Path
) -> None:
    adamw = Scenario(GRPO, [], trainer=schema.TrainerConfig())
    _, saved = trainer_of(path, adamw)
    saved.capture()
    saved.write(tmp_path / "saved")
    makers = {"qwen3.5": save_qwen35, "tied": save_qwen3, "same": lambda _: path}
    scenario = replace(adamw, trainer=replace(adamw.trainer, optimizer=schema.Optimizer[trainer]))
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
    scenario = Scenario(GRPO, groups, trainer=schema.TrainerConfig(lr=1e-3))
    step, state = trainer_of(path, scenario)
    train(step, scenario)
    return OneProcess(state)


async def saved(checkpoints: Checkpoints, trainer: OneProcess, *steps: int) -> list[Path]:
    paths = [await checkpoints.save(trainer, state_of(step)) for step in steps]
    await checkpoints.wait()
    return paths


def state_of(step: int) -> RunState:
    return RunState(step, step, extra={"cursor": {"epoch": 0, "returned": ["a/1@0"]}}, model={"vocab_size": 101})


def names(folder: Path) -> set[str]:
    return {each.name for each in (folder / "checkpoints").iterdir()}


def test_a_saved_state_is_read_back(trainer: OneProcess, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    (path,) = asyncio.run(saved(checkpoints, trainer, 7))
    assert checkpoints.latest() == path == tmp_path / "checkpoints" / "step_7"
    assert checkpoints.read_state(path) == state_of(7)
    metrics = checkpoints.metrics
    assert metrics["checkpoint/bytes"] > trainer.state.bytes
    assert 0 < metrics["checkpoint/blocked_s"] < 60
    assert 0 < metrics["checkpoint/write_s"] < 60


def test_the_newest_are_kept_and_nothing_else(trainer: OneProcess, tmp_path: Path) -> None:
    asyncio.run(saved(Checkpoints(tmp_path, keep=2), trainer, 8, 9, 10, 11))
    assert names(tmp_path) == {"latest", "step_10", "step_11"}


def test_the_one_before_stays_until_the_new_one_is_the_latest(trainer: OneProcess, tmp_path: Path) -> None:
    async def story() -> None:
        checkpoints = Checkpoints(tmp_path, keep=1)
        (first,) = await saved(checkpoints, trainer, 1)
        trainer.gate.clear()
        second = await checkpoints.save(trainer, state_of(2))
        assert names(tmp_path) == {"latest", "step_1", "step_2.tmp"}
        assert checkpoints.latest() == first
        third = asyncio.create_task(checkpoints.save(trainer, state_of(3)))
        await asyncio.sleep(0.05)
        assert not third.done()  # it waits for the second
        trainer.gate.set()
        assert await asyncio.wait_for(third, DEADLINE_S) == second.with_name("step_3")
        assert checkpoints.latest() == second
        await checkpoints.wait()
        assert names(tmp_path) == {"latest", "step_3"}

    asyncio.run(story())


def test_a_step_that_was_committed_is_not_written_again(trainer: OneProcess, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (path,) = asyncio.run(saved(checkpoints, trainer, 4))
    written = path.stat().st_ino
    asyncio.run(saved(checkpoints, trainer, 4))
    assert path.stat().st_ino == written


def test_going_back_forgets_what_came_later(trainer: OneProcess, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    first, _, third = asyncio.run(saved(checkpoints, trainer, 5, 6, 7))
    checkpoints.rewind(first)
    assert (checkpoints.latest(), third.exists(), names(tmp_path)) == (first, False, {"latest", "step_5"})
    asyncio.run(saved(checkpoints, trainer, 6))
    assert names(tmp_path) == {"latest", "step_5", "step_6"}


def test_what_was_left_unfinished_is_removed_at_the_start(trainer: OneProcess, tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / "step_3.tmp"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    checkpoints.prepare(trainer.state.bytes)
    assert names(tmp_path) == set()


# --- what goes wrong gets one sentence, and leaves the checkpoint before as it was


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files end at 100 kB, as on a disk that is full: a write beyond that fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(
    small_files: None, trainer: OneProcess, tmp_path: Path
) -> None:
    async def story() -> None:
        checkpoints = Checkpoints(tmp_path, keep=2)
        (first,) = await saved(checkpoints, trainer, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        await checkpoints.save(trainer, state_of(2))
        with pytest.raises(CheckpointError, match=r"step_2.* could not be written by trainer rank 0: .*") as raised:
            await checkpoints.wait()
        assert "\n" not in str(raised.value)
        assert names(tmp_path) == {"latest", "step_1"}
        assert checkpoints.latest() == first
        assert read_state(first) == state_of(1)
        await checkpoints.wait()  # it was said once

    asyncio.run(story())


def test_a_disk_without_room_is_found_before_anything_is_written(
    trainer: OneProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (first,) = asyncio.run(saved(checkpoints, trainer, 1))
    usage = __import__("shutil").disk_usage(tmp_path)
    monkeypatch.setattr("app.checkpoint.manager.shutil.disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(CheckpointError, match=r"step_2 cannot be begun: it takes .* GiB and .* has 0\.00 GiB left"):
        asyncio.run(checkpoints.save(trainer, state_of(2)))
    assert (checkpoints.latest(), names(tmp_path)) == (first, {"latest", "step_1"})
    with pytest.raises(ConfigError, match=r"checkpoint\.keep=2 is not accepted: 3 checkpoints of .* GiB do not fit"):
        checkpoints.prepare(2**40)


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(trainer: OneProcess) -> None:
    folder = Path("/sys/kernel")  # not even root may
    with pytest.raises(ConfigError, match=r"cannot hold checkpoints: .*give a hydra\.run\.dir that can be written to"):
        Checkpoints(folder, keep=2).prepare(0)
    with pytest.raises(CheckpointError, match=r"checkpoint /sys/kernel/checkpoints/step_1 cannot be begun"):
        asyncio.run(Checkpoints(folder, keep=2).save(trainer, state_of(1)))


def test_a_damaged_checkpoint_is_named_before_anything_is_restored(trainer: OneProcess, tmp_path: Path) -> None:
    (path,) = asyncio.run(saved(Checkpoints(tmp_path, keep=2), trainer, 1))
    file = path / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"is not whole: __0_0\.distcp has \d+ bytes and not \d+"):
        read_state(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"is not whole: __0_0\.distcp is missing"):
        read_state(path)
    file.write_bytes(whole)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot be read: state\.json is damaged"):
        read_state(path)
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_state(path)


def test_a_truncated_file_is_named_by_the_rank_that_reads_it(trainer: OneProcess, path: Path, tmp_path: Path) -> None:
    (saved_at,) = asyncio.run(saved(Checkpoints(tmp_path, keep=2), trainer, 1))
    for name in (".metadata", "__0_0.distcp"):
        file = saved_at / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        _, other = trainer_of(path, Scenario(GRPO, [], trainer=schema.TrainerConfig()))
        with pytest.raises(CheckpointError, match=r"checkpoint .*step_1 (could not|cannot) be read") as raised:
            other.restore(saved_at)
        assert "\n" not in str(raised.value)
        file.write_bytes(whole)


def test_a_checkpoint_of_another_model_is_refused_by_what_differs() -> None:
    state, path = RunState(1, 1, model={"vocab_size": 101, "source": "/old/place"}), Path("step_1")
    require_model(state, {"vocab_size": 101, "source": "/new/place"}, path)
    with pytest.raises(CheckpointError, match=r"step_1 is of another model: its vocab_size is 101, this model's 7"):
        require_model(state, {"vocab_size": 7}, path)


# --- kill -9


def killed_while_saving(path: Path, folder: Path, after: int) -> int:
    """Kill a process that saves step after step, while it writes one; the last step that it called committed."""
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


def assert_latest_is_whole(path: Path, folder: Path, committed: int) -> None:
    found = latest(folder)
    assert found is not None
    assert read_state(found).step in (committed, committed + 1)  # the kill may have come before it was said
    _, state = trainer_of(path, Scenario(GRPO, [], trainer=schema.TrainerConfig()))
    state.restore(found)
    assert state.optimizer.updates == 1
    Checkpoints(folder, keep=2).prepare(state.bytes)
    assert not list((folder / "checkpoints").glob("*.tmp"))


def test_kill_9_in_the_middle_of_a_write_leaves_the_latest_whole(path: Path, tmp_path: Path) -> None:
    assert_latest_is_whole(path, tmp_path, killed_while_saving(path, tmp_path, after=2))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_leave_the_latest_whole(path: Path, tmp_path: Path) -> None:
    for each in range(20):
        assert_latest_is_whole(path, tmp_path, killed_while_saving(path, tmp_path, after=1 + each % 4))

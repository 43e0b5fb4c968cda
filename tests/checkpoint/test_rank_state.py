"""A rank's share of a checkpoint: a restored trainer continues as if it had never stopped, on any number of ranks."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from app.config.model import LoraConfig
from app.config.trainer import Optimizer, TrainerConfig
from app.errors import CheckpointError
from app.trainer.checkpoint_state import ChecksummedFiles
from app.types import ScoredGroup
from app.utils.files import crc32_of
from tests.checkpoint.resume_scenarios import RunResult, on_two_ranks, run_and_save, run_resumed, trainer_of
from tests.model.support import relative, save_qwen3, save_qwen35
from tests.trainer.ranks import run_on
from tests.trainer.support import Scenario, parameters, sampled, scored_groups, train
from tests.trainer.test_step import GRPO


@pytest.fixture(scope="module")
def groups(path: Path) -> list[ScoredGroup]:
    return sampled(path, scored_groups(4))


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


@dataclass(frozen=True)
class Runs:
    """Runs that save after two of four steps, and runs that resume from there, by their numbers of ranks."""

    lora: LoraConfig
    folder: Path  # of a checkpoint of one rank, `one`, and one of two ranks, `two`
    by_name: dict[str, RunResult]


@pytest.fixture(scope="module", params=[LoraConfig(), LoraConfig(rank=3, alpha=2.0)], ids=["all weights", "adapters"])
def runs(
    request: pytest.FixtureRequest, path: Path, groups: list[ScoredGroup], tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    lora, folder = request.param, tmp_path_factory.mktemp("results")
    one, two = folder / "one", folder / "two"
    results = {
        "1": run_and_save(None, path, groups, one, lora),
        "1 to 1": run_resumed(None, path, groups, one, lora),
        **run_on(2, on_two_ranks, folder / "results.pt", path, groups, one, two, lora),
        "2 to 1": run_resumed(None, path, groups, two, lora),
    }
    return Runs(lora, folder, results)


@pytest.mark.parametrize(("continued", "original"), [("1 to 1", "1"), ("2 to 2", "2")])
def test_a_restored_trainer_continues_bit_for_bit(continued: str, original: str, runs: Runs) -> None:
    one, other = runs.by_name[continued], runs.by_name[original]
    for version, metrics in one.metrics.items():
        exact = {name: value for name, value in metrics.items() if not name.startswith(("time/", "trainer/"))}
        assert exact == {name: other.metrics[version][name] for name in exact}
    for name, parameter in other.after.items():
        assert torch.equal(one.saved[name], other.saved[name]), name
        assert torch.equal(one.after[name], parameter), name


@pytest.mark.parametrize(("continued", "original"), [("1 to 2", "1"), ("2 to 1", "2")])
def test_another_number_of_ranks_continues_the_same_losses(continued: str, original: str, runs: Runs) -> None:
    one, other = runs.by_name[continued], runs.by_name[original]
    for version, metrics in one.metrics.items():
        for name in ("loss/policy", "loss/total", "grad_norm", "lr", "entropy", "mismatch/kl"):
            assert metrics[name] == pytest.approx(other.metrics[version][name], rel=1e-4, abs=1e-6), (version, name)
    for name, parameter in other.saved.items():
        assert torch.equal(one.saved[name], parameter), name
        assert relative(one.after[name], other.after[name]) < (1e-4 if runs.lora.enabled else 1e-5), name


def test_the_ranks_return_the_checksum_of_every_file(runs: Runs) -> None:
    for ranks, name in ((1, "one"), (2, "two")):
        written = sorted((runs.folder / name).iterdir())
        assert len(written) == ranks + 1  # one of each rank, and the metadata
        expected = dict(zip([file.name for file in written], crc32_of(written), strict=True))
        assert runs.by_name[str(ranks)].checksums == expected


def test_a_checkpoint_holds_what_is_trained_and_its_optimizer(runs: Runs, path: Path) -> None:
    """With adapters nothing of the base."""
    for name in ("one", "two"):
        keys = dcp.FileSystemReader(runs.folder / name).read_metadata().state_dict_metadata
        tensors = {key for key in keys if not key.startswith("schedule.")}
        assert len(tensors) == 4 * len(runs.by_name["1"].saved)  # the parameter, step and two moments
        assert all(("lora_A" in key or "lora_B" in key) == runs.lora.enabled for key in tensors)


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
    assert 0 < state.capture() - state.bytes < 1000  # update counts


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

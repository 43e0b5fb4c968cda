"""An export is a model directory like the source, and its model matches the trainer."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState
from app.config import RunConfig
from app.config.model import LoraConfig, ModelConfig
from app.config.trainer import TrainerConfig
from app.device.torchvision_shim import transformers
from app.errors import CheckpointError
from app.mode.export import export_run
from app.model.hf_directory import identity
from app.recovery.run_lock import FolderInUse, run_lock
from app.tracking.run_folder import CONFIG
from app.trainer.step import TrainStep
from tests.checkpoint.plain_files import DATA, flip_a_byte
from tests.checkpoint.resume_scenarios import ALL_WEIGHTS, trainer_of
from tests.checkpoint.saves import OneProcess
from tests.compose import composed
from tests.folders import content
from tests.model.support import batch, logprobs_of, save_qwen3, save_qwen35
from tests.trainer.plain import transformers_model
from tests.trainer.support import Scenario, scored_groups, train
from tests.trainer.test_step import GRPO


def trained(source: Path, run: Path, lora: LoraConfig = ALL_WEIGHTS, chat_template: str | None = None) -> TrainStep:
    """Return the trainer of a run whose only checkpoint is that of step 3."""
    scenario = Scenario(GRPO, scored_groups(2), trainer=TrainerConfig(lr=0.05), lora=lora)
    step, state = trainer_of(source, scenario)
    for version in range(1, 4 if lora.enabled else 2):  # adapters begin at 0
        train(step, scenario, version)

    async def save() -> None:
        checkpoints = CheckpointManager(run, keep=1)
        model = identity(source, lora, chat_template)
        await checkpoints.save(OneProcess(state), RunState(3, 3, model=model))
        await checkpoints.wait()

    asyncio.run(save())
    return step


def config_of(source: Path, **settings: str) -> RunConfig:
    return RunConfig(model=ModelConfig(path=str(source)), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [save_qwen3, save_qwen35])
def test_transformers_with_an_export_matches_the_trainer(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    run = tmp_path / "run"
    step = trained(source, run)
    out = export_run(config_of(source), run)
    assert out == run / "export"
    with torch.no_grad():
        ours, _ = step.model(**batch(101).inputs, temperature=1.0)
        torch.testing.assert_close(ours.double(), logprobs_of(transformers_model(out)), atol=2e-5, rtol=0)
    before, after = (load_file(each / "model.safetensors") for each in (source, out))
    assert {name: (each.shape, each.dtype) for name, each in after.items()} == {
        name: (each.shape, each.dtype) for name, each in before.items()
    }
    untrained = {name for name in before if torch.equal(before[name], after[name])}
    assert untrained == {name for name in before if "visual" in name or name.startswith("mtp")}
    if make is save_qwen35:  # of the hub's layout, with a vision tower
        name, whole = "model.language_model.norm.weight", transformers().AutoModelForImageTextToText
        assert torch.equal(whole.from_pretrained(out).state_dict()[name], after[name])
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            assert (out / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_of_a_bfloat16_model_has_the_precision_of_its_run(dtype: torch.dtype, tmp_path: Path) -> None:
    source, run = save_qwen3(tmp_path / "source"), tmp_path / "run"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(rounded, source / "model.safetensors", metadata={"format": "pt"})
    step = trained(source, run)
    (run / CONFIG).mkdir()
    name = str(dtype).removeprefix("torch.")
    OmegaConf.save(OmegaConf.structured(composed(f"device.dtype={name}")), run / CONFIG / "config.yaml")

    out = export_run(config_of(source), run)
    weights = load_file(out / "model.safetensors")
    expected = dict(step.model.causal_lm.named_parameters())
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, expected[name].detach().to(dtype)), name


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and a run that trained it."""
    source, run = save_qwen3(tmp_path / "source"), tmp_path / "run"
    trained(source, run)
    return source, run


def test_a_damaged_checkpoint_is_not_exported(exported: tuple[Path, Path]) -> None:
    source, run = exported
    flip_a_byte(run / "checkpoints" / "step_3" / DATA)
    with pytest.raises(CheckpointError, match=r"step_3 .*__0_0\.distcp has checksum"):
        export_run(config_of(source), run)
    assert {each.name for each in run.iterdir()} == {"checkpoints", "driver.lock"}


def test_a_run_that_is_being_written_is_not_exported_into(exported: tuple[Path, Path]) -> None:
    source, run = exported
    with run_lock(run):
        before = content(run)
        with pytest.raises(FolderInUse):
            export_run(config_of(source), run)
        assert content(run) == before
    assert export_run(config_of(source), run) == run / "export"


@pytest.mark.parametrize("place", ["final/checkpoints", "checkpoints/aside"])
def test_a_checkpoint_beside_the_others_is_exported_as_one_of_its_run(place: str, exported: tuple[Path, Path]) -> None:
    source, run = exported
    (run / CONFIG).mkdir()
    OmegaConf.save(OmegaConf.structured(composed("device.dtype=float32")), run / CONFIG / "config.yaml")
    (run / place).mkdir(parents=True)
    (run / "checkpoints" / "step_3").rename(run / place / "step_3")
    assert export_run(config_of(source, resume=str(run / place / "step_3")), None) == run / "export"


def test_the_command_exports_a_run_without_changing_its_records(exported: tuple[Path, Path]) -> None:
    _, run = exported
    command = [sys.executable, "-m", "app", "mode=export", f"hydra.run.dir={run}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, str(run / "export"))
    assert {each.name for each in run.iterdir()} == {"checkpoints", "export", "driver.lock"}

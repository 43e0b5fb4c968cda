"""A checkpoint of adapters: what it holds, on which base and with which settings it goes on, and its export."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState, lora_of, read_state, require_model
from app.config import RunConfig
from app.config.model import LoraConfig, ModelConfig
from app.config.trainer import TrainerConfig
from app.errors import CheckpointError
from app.mode.export import export_run
from app.model.hf_directory import identity
from app.model.hf_import import transformers
from app.trainer.step import TrainStep
from app.types import ScoredGroup
from tests.checkpoint.resume_scenarios import RunResult, on_two_ranks, run_and_save, run_resumed, trainer_of
from tests.checkpoint.saves import OneProcess
from tests.model.support import batch, relative, save_qwen3, save_qwen35
from tests.trainer.plain import transformers_model
from tests.trainer.ranks import run_on
from tests.trainer.support import Scenario, sampled, scored_groups, train
from tests.trainer.test_step import GRPO

pytestmark = pytest.mark.usefixtures("one_thread")
LORA = LoraConfig(rank=3, alpha=2.0)
ALL = LoraConfig()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"), tied=False)


@pytest.fixture(scope="module")
def groups(path: Path) -> list[ScoredGroup]:
    return sampled(path, scored_groups(4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def results(path: Path, groups: list[ScoredGroup], folder: Path) -> dict[str, RunResult]:
    """Runs that save after two of four steps, and runs that resume from there, by their numbers of ranks."""
    one, two = folder / "one", folder / "two"
    return {
        "1": run_and_save(None, path, groups, one, LORA),
        "1 to 1": run_resumed(None, path, groups, one, LORA),
        **run_on(2, on_two_ranks, folder / "results.pt", path, groups, one, two, LORA),
        "2 to 1": run_resumed(None, path, groups, two, LORA),
    }


@pytest.mark.parametrize(("continued", "original"), [("1 to 1", "1"), ("2 to 2", "2")])
def test_restored_adapters_continue_bit_for_bit(continued: str, original: str, results: dict[str, RunResult]) -> None:
    one, other = results[continued], results[original]
    for name, parameter in other.after.items():
        assert torch.equal(one.saved[name], other.saved[name]), name
        assert torch.equal(one.after[name], parameter), name
    assert one.metrics[4]["lora/norm"] == other.metrics[4]["lora/norm"] > 0


@pytest.mark.parametrize(("continued", "original"), [("1 to 2", "1"), ("2 to 1", "2")])
def test_another_number_of_ranks_continues_the_same_losses(
    continued: str, original: str, results: dict[str, RunResult]
) -> None:
    one, other = results[continued], results[original]
    for version, metrics in one.metrics.items():
        for name in ("loss/policy", "grad_norm", "lr", "entropy", "lora/norm"):
            assert metrics[name] == pytest.approx(other.metrics[version][name], rel=1e-4, abs=1e-6), (version, name)
    for name, parameter in other.saved.items():
        assert torch.equal(one.saved[name], parameter), name
        assert relative(one.after[name], other.after[name]) < 1e-4, name


def test_a_checkpoint_holds_the_adapters_and_their_optimizer_but_not_the_base(
    results: dict[str, RunResult], folder: Path
) -> None:
    for name in ("one", "two"):
        keys = dcp.FileSystemReader(folder / name).read_metadata().state_dict_metadata
        tensors = {key for key in keys if not key.startswith(("random.", "schedule."))}
        assert len(tensors) == 3 * 7 * 2 * 4  # the parameter, step and two moments
        assert all("lora_A" in key or "lora_B" in key for key in tensors)


# --- whose adapters


def test_the_state_names_base_and_settings(path: Path) -> None:
    model = identity(path, LORA)
    assert model["lora"] == asdict(LORA)
    assert len(model["base"]) == 16
    assert lora_of(RunState(1, 1, model=json.loads(json.dumps(model)))) == LORA
    assert not {"lora", "base"} & identity(path, ALL).keys()
    assert not lora_of(RunState(1, 1, model=identity(path, ALL))).enabled


@pytest.mark.parametrize(
    ("saved", "ours", "holds", "trains"),
    [
        (ALL, LORA, "all weights", "adapters of rank 3, alpha 2 and targets all"),
        (LORA, ALL, "adapters of rank 3, alpha 2 and targets all", "all weights"),
        (LORA, replace(LORA, rank=4), "adapters of rank 3, alpha 2 ", "adapters of rank 4, alpha 2 "),
        (LORA, replace(LORA, alpha=0.5), "adapters of rank 3, alpha 2 ", "adapters of rank 3, alpha 0.5 "),
        (LORA, replace(LORA, targets=["q_proj", "v_proj"]), "targets all", "targets q_proj, v_proj"),
    ],
)
def test_other_adapters_than_the_checkpoints_are_refused(
    saved: LoraConfig, ours: LoraConfig, holds: str, trains: str, path: Path
) -> None:
    state = RunState(3, 3, model=identity(path, saved))
    require_model(state, identity(path, saved), Path("step_3"))
    with pytest.raises(CheckpointError) as refused:
        require_model(state, identity(path, ours), Path("step_3"))
    sentence = str(refused.value)
    assert sentence.startswith("checkpoint step_3 holds ")
    assert "model.lora" in sentence
    assert holds in sentence.partition(", and this run trains ")[0]
    assert trains in sentence.partition(", and this run trains ")[2]


def test_a_base_of_the_same_shapes_with_other_weights_is_refused(path: Path, tmp_path: Path) -> None:
    other = save_qwen3(tmp_path / "other", tied=False, seed=1)
    state = RunState(3, 3, model=identity(path, LORA))
    with pytest.raises(CheckpointError, match=r"step_3 .*another base model: .*other"):
        require_model(state, identity(other, LORA), Path("step_3"))
    require_model(RunState(3, 3, model=identity(path, ALL)), identity(other, ALL), Path("step_3"))  # it has its own


# --- export


def trained(source: Path, run: Path, lora: LoraConfig = LORA) -> TrainStep:
    """Return the trainer of a run whose only checkpoint is that of step 3."""
    scenario = Scenario(GRPO, scored_groups(2), trainer=TrainerConfig(lr=0.05), lora=lora)
    step, state = trainer_of(source, scenario)
    for version in (1, 2, 3):
        train(step, scenario, version)

    async def save() -> None:
        checkpoints = CheckpointManager(run, keep=1)
        await checkpoints.save(OneProcess(state), RunState(3, 3, model=identity(source, lora)))
        await checkpoints.wait()

    asyncio.run(save())
    return step


def logprobs_of(model: torch.nn.Module) -> torch.Tensor:
    """Log-probabilities of the batch's completions, of a model of transformers or PEFT: [N]."""
    found = []
    for sequence in batch(101).sequences:
        logits = model(input_ids=sequence[None]).logits[0].double()
        found.append(logits.log_softmax(-1)[:-1].gather(1, sequence[1:, None])[:, 0][1:])  # a prompt of two tokens
    return torch.cat(found)


@torch.no_grad()
@pytest.mark.parametrize("save", [save_qwen3, save_qwen35])
def test_the_merged_export_and_peft_with_the_adapter_have_the_log_probabilities_of_the_trainer(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    source, run = save(tmp_path / "source"), tmp_path / "run"
    with torch.enable_grad():
        step = trained(source, run)
    out = export_run(RunConfig(model=ModelConfig(path=str(source))), run)

    ours, _ = step.model(**batch(101).inputs, temperature=1.0)
    base = transformers_model(source)
    assert (ours - logprobs_of(base)).abs().max() > 0.1
    torch.testing.assert_close(logprobs_of(transformers_model(out)), ours.double(), atol=1e-4, rtol=0)

    loaded = transformers().AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    adapted = PeftModel.from_pretrained(loaded, out / "adapter", autocast_adapter_dtype=False)
    torch.testing.assert_close(logprobs_of(adapted), ours.double(), atol=1e-4, rtol=0)

    assert [ModelCard.load(each / "README.md").data.library_name for each in (out, out / "adapter")] == [
        "transformers",
        "peft",
    ]
    stored = load_file(out / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    loaded_names = {name for name in adapted.state_dict() if "lora_" in name}
    assert {name.replace(".default", "") for name in loaded_names} == stored.keys()


def test_an_export_changes_the_adapted_weights_alone_and_keeps_their_dtype(tmp_path: Path) -> None:
    source, run = save_qwen35(tmp_path / "source"), tmp_path / "run"
    tensors = load_file(source / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(rounded, source / "model.safetensors", metadata={"format": "pt"})
    step = trained(source, run, replace(LORA, targets=["q_proj", "in_proj_qkv", "in_proj_z"]))
    after = load_file(export_run(RunConfig(model=ModelConfig(path=str(source))), run) / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in after.items()} == dict.fromkeys(rounded, torch.bfloat16)

    changed = {name for name in after if not torch.equal(after[name], rounded[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "in_proj_qkv", "in_proj_z"}
    assert len(changed) == 1 + 3 * 2
    attention: Any = step.model.layers[3].self_attn
    layer = attention.q_proj
    merged = layer.weight.float() + layer.scale * layer.lora_B @ layer.lora_A
    name = "model.language_model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(after[name], merged.bfloat16())  # rounded once


def test_an_export_needs_the_base_that_was_trained_on(tmp_path: Path) -> None:
    source, run = save_qwen3(tmp_path / "source"), tmp_path / "run"
    trained(source, run)
    assert lora_of(read_state(run / "checkpoints" / "step_3")) == LORA
    source.rename(tmp_path / "moved")
    other = save_qwen3(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match=r"step_3 .*another base model"):
        export_run(RunConfig(model=ModelConfig(path=str(other))), run)
    out = export_run(RunConfig(model=ModelConfig(path=str(tmp_path / "moved"))), run)
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "moved")

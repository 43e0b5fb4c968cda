"""A checkpoint of adapters: what it holds, on which base and with which settings it goes on, and its export."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from app.checkpoint.run_state import RunState, lora_of, require_model
from app.config.model import LoraConfig
from app.device.torchvision_shim import transformers
from app.errors import CheckpointError
from app.mode.export import export_run
from app.model.hf_directory import identity
from tests.checkpoint.test_export import config_of, trained
from tests.model.support import batch, logprobs_of, save_qwen3, save_qwen35
from tests.trainer.plain import transformers_model

LORA = LoraConfig(rank=3, alpha=2.0)
ALL = LoraConfig()


def test_the_state_names_base_and_settings(path: Path) -> None:
    model = identity(path, LORA)
    assert model["lora"] == {name: value for name, value in asdict(LORA).items() if name != "path"}
    assert len(model["base"]) == 16
    assert lora_of(RunState(1, 1, model=json.loads(json.dumps(model)))) == LORA
    assert not {"lora", "base"} & identity(path, ALL).keys()
    assert not lora_of(RunState(1, 1, model=identity(path, ALL))).enabled


@pytest.mark.parametrize(
    ("saved", "ours"),
    [
        (ALL, LORA),
        (LORA, ALL),
        (LORA, replace(LORA, rank=4)),
        (LORA, replace(LORA, alpha=0.5)),
        (LORA, replace(LORA, targets=["q_proj", "v_proj"])),
    ],
)
def test_other_adapters_than_the_checkpoints_are_refused(saved: LoraConfig, ours: LoraConfig, path: Path) -> None:
    state = RunState(3, 3, model=identity(path, saved))
    require_model(state, identity(path, saved), Path("step_3"))
    with pytest.raises(CheckpointError, match=r"checkpoint step_3 .*model\.lora"):
        require_model(state, identity(path, ours), Path("step_3"))


def test_a_base_of_the_same_shapes_with_other_weights_is_refused(path: Path, tmp_path: Path) -> None:
    other = save_qwen3(tmp_path / "other", tied=False, seed=1)
    state = RunState(3, 3, model=identity(path, LORA))
    with pytest.raises(CheckpointError, match=r"step_3 .*another model: its base is .*other"):
        require_model(state, identity(other, LORA), Path("step_3"))
    with pytest.raises(CheckpointError, match="its weights"):  # the reference of a KL penalty would be another
        require_model(RunState(3, 3, model=identity(path, ALL)), identity(other, ALL), Path("step_3"))
    earlier = {name: value for name, value in identity(path, ALL).items() if name not in ("weights", "tokenizer")}
    require_model(RunState(3, 3, model=earlier), identity(other, ALL), Path("step_3"))


@torch.no_grad()
@pytest.mark.parametrize("save", [save_qwen3, save_qwen35])
def test_the_merged_export_and_peft_with_the_adapter_have_the_log_probabilities_of_the_trainer(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    source, run = save(tmp_path / "source"), tmp_path / "run"
    with torch.enable_grad():
        step = trained(source, run, LORA)
    out = export_run(config_of(source), run)

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
    written = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(source)
    loaded_names = {name for name in adapted.state_dict() if "lora_" in name}
    assert {name.replace(".default", "") for name in loaded_names} == stored.keys()


def test_an_export_changes_the_adapted_weights_alone_and_keeps_their_dtype(tmp_path: Path) -> None:
    source, run = save_qwen35(tmp_path / "source"), tmp_path / "run"
    tensors = load_file(source / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(rounded, source / "model.safetensors", metadata={"format": "pt"})
    step = trained(source, run, replace(LORA, targets=["q_proj", "v_proj", "in_proj_qkv", "in_proj_z"]))
    (run / "config").mkdir()
    (run / "config" / "config.yaml").write_text("model:\n  path: owner/base\n")
    out = export_run(config_of(source), run)
    named = json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == "owner/base"  # by which others find it, not a folder of this machine
    after = load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in after.items()} == dict.fromkeys(rounded, torch.bfloat16)

    changed = {name for name in after if not torch.equal(after[name], rounded[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "in_proj_qkv", "in_proj_z"}
    assert len(changed) == 2 + 3 * 2
    attention: Any = step.model.layers[3].self_attn
    layer = attention.q_proj
    merged = layer.weight.float() + layer.scale * layer.lora_B @ layer.lora_A
    name = "model.language_model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(after[name], merged.bfloat16())  # rounded once

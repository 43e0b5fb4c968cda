"""A run that continues an adapter of PEFT starts as PEFT's own model; what cannot be continued is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.config import RunConfig
from app.device.torchvision_shim import transformers
from app.mode.export import merge_adapter
from app.model.hf_directory import identity, require_complete
from app.model.load import load
from app.model.lora.base_weights import require_targets
from tests.compose import composed
from tests.model.support import batch, logprobs_of, save_qwen3, save_qwen35
from tests.refusals import refused

ATTENTION = ["q_proj", "v_proj"]
LINEAR = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"]


def save_adapter(base: Path, out: Path, **settings: Any) -> Any:
    """Write an adapter with random A and B as PEFT does; return PEFT's model."""
    model = transformers().AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(str(out))
    return adapted.eval()


def continued(base: Path, adapter: Path, *overrides: str) -> RunConfig:
    return composed("model=hf", f"model.path={base}", f"model.lora.path={adapter}", *overrides)


@torch.no_grad()
@pytest.mark.parametrize(
    ("save", "settings", "alpha"),
    [
        (save_qwen3, {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"}, 12.0),
        (save_qwen3, {"r": 4, "lora_alpha": 12, "target_modules": ATTENTION, "use_rslora": True}, 24.0),
        (save_qwen35, {"r": 3, "lora_alpha": 6, "target_modules": LINEAR, "lora_dropout": 0.5}, 6.0),
    ],
)
def test_the_policy_starts_as_pefts_own_model(
    save: Callable[[Path], Path], settings: dict[str, Any], alpha: float, tmp_path: Path, one_thread: None
) -> None:
    base = save(tmp_path / "base")
    model = save_adapter(base, tmp_path / "adapter", **settings)
    config = continued(base, tmp_path / "adapter")
    lora = config.model.lora
    assert (lora.rank, lora.alpha, config.trainer.lr) == (settings["r"], pytest.approx(alpha), 1e-5)
    require_targets(base, lora)

    policy = load(base, mesh=None, device="cpu", lora=lora)
    ours = policy(**batch(101).inputs, temperature=0.7)[0]
    bare = load(base, mesh=None, device="cpu")(**batch(101).inputs, temperature=0.7)[0]
    assert (ours - logprobs_of(model, 0.7)).abs().max() < 1e-5
    assert (ours - bare).abs().max() > 0.1
    assert "path" not in identity(base, lora)["lora"]

    out = merge_adapter(config, tmp_path / "run")
    merged = load(out, mesh=None, device="cpu")(**batch(101).inputs, temperature=0.7)[0]
    assert (merged - logprobs_of(model, 0.7)).abs().max() < 1e-4
    with refused("hydra.run.dir", tmp_path / "run"):
        merge_adapter(config, tmp_path / "run")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_qwen3(tmp_path / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    save_adapter(base, tmp_path / "adapter", r=4, lora_alpha=12, target_modules=ATTENTION)
    return tmp_path / "adapter"


@pytest.mark.parametrize(("name", "value"), [("rank", 8), ("alpha", 16.0), ("targets", ["q_proj"])])
def test_rank_alpha_and_layers_are_the_adapters_and_others_on_the_command_line_are_refused(
    name: str, value: object, base: Path, adapter: Path
) -> None:
    lora = composed("model=qwen3_4b_lora", "device=cuda", f"model.lora.path={adapter}", "model.lora.rank=4").model.lora
    assert (lora.rank, lora.alpha, lora.targets) == (4, 12.0, ATTENTION)
    with refused(f"model.lora.{name}", value):
        continued(base, adapter, f"model.lora.{name}={value}")


@pytest.mark.parametrize(
    "change",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"peft_type": "IA3"},
        {"rank_pattern": {"q": 2}},
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(change: dict[str, Any], base: Path, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with refused("model.lora.path", adapter, *change):
        continued(base, adapter)


def test_directories_in_the_place_of_model_and_adapter_are_refused(base: Path, adapter: Path) -> None:
    with refused("model.lora.path", base, "adapter_config.json"):
        continued(base, base)
    with refused("model.path", adapter, "model.lora.path"):
        require_complete(adapter, str(adapter))
    with refused("model.lora.path", adapter, "mode=export"):  # else the model would be evaluated without it
        continued(base, adapter, "mode=eval").validate()


def test_an_adapter_of_another_model_or_of_some_layers_is_refused(base: Path, adapter: Path) -> None:
    lora = continued(base, adapter).model.lora
    tensors = load_file(adapter / "adapter_model.safetensors")
    fewer = {name: tensor for name, tensor in tensors.items() if ".layers.0." not in name}
    save_file(fewer, adapter / "adapter_model.safetensors")
    with refused("model.lora.path", adapter, "layers.0.self_attn.q_proj.lora_A"):
        load(base, mesh=None, device="cpu", lora=lora)

    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, name: tensors[name][:, :5].contiguous()}, adapter / "adapter_model.safetensors")
    with refused("model.lora.path", adapter, name):
        require_targets(base, lora)

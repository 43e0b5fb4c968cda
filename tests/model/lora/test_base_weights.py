"""A base model is known by its weights, not by where they lie."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from app.config.model import LoraConfig
from app.model.lora.base_weights import fingerprint, require_targets
from app.model.lora.targets import check_served
from tests.model.support import save_qwen3, save_qwen35
from tests.refusals import refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_qwen3(tmp_path / "model")


def test_another_value_name_or_dtype_is_another_base(path: Path, tmp_path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    changed = tensors[name].clone()
    changed[0, 3] += 1e-3
    others = {
        "value": tensors | {name: changed},
        "name": {key.replace("up_proj", "other"): tensor for key, tensor in tensors.items()},
        "dtype": tensors | {name: tensors[name].bfloat16()},
        "seed": load_file(save_qwen3(tmp_path / "other", seed=1) / "model.safetensors"),
    }
    found = {fingerprint(path)}
    for kind, changed_tensors in others.items():
        (tmp_path / kind).mkdir()
        save_file(changed_tensors, tmp_path / kind / "model.safetensors")
        found.add(fingerprint(tmp_path / kind))
    assert len(found) == 5


def test_unreadable_weights_are_a_configuration_error(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with refused("model.path", path, "safetensors"):
        fingerprint(path)


def test_targets_are_compared_with_the_weights_before_anything_starts(path: Path, tmp_path: Path) -> None:
    require_targets(path, LoraConfig(rank=4))
    require_targets(path, LoraConfig(rank=4, targets=["q_proj", "v_proj", "down_proj"]))
    linear = save_qwen35(tmp_path / "linear")
    require_targets(linear, LoraConfig(rank=4, targets=["in_proj_qkv", "in_proj_z", "out_proj"]))
    for folder, targets, accepted in (
        (path, ["q_proj", "qproj"], "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        (path, ["embed_tokens"], "down_proj"),
        (path, ["lm_head"], "down_proj"),
        (path, ["input_layernorm"], "down_proj"),
        (linear, ["in_proj_b"], "in_proj_qkv, in_proj_z"),
    ):
        with refused("model.lora.targets", targets, accepted):
            require_targets(folder, LoraConfig(rank=4, targets=targets))


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (["in_proj_z"], "in_proj_qkv"),
        (["q_proj", "o_proj"], "v_proj"),
        (["k_proj", "v_proj"], "q_proj"),
        (["up_proj", "down_proj"], "gate_proj"),
    ],
)
def test_engines_serve_projections_that_they_fuse_together(targets: list[str], missing: str) -> None:
    check_served([*targets, missing])
    check_served(["all"])
    with refused("model.lora.targets", targets, missing):
        check_served(targets)

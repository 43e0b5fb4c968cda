"""An export is its source directory with other values in the trained tensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.device.torchvision_shim import transformers
from app.errors import RunError
from app.model import hf_export
from app.model.hf_export import export
from app.model.load import load
from app.model.policy import PolicyModel, named_checkpoint_tensors
from tests.model.support import batch, save_qwen3


def trained(path: Path) -> PolicyModel:
    """A policy whose parameters differ from its checkpoint."""
    policy = load(path, mesh=None, device="cpu")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.25).add_(0.01)
    return policy


def state(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_checkpoint_tensors(policy)}


@pytest.mark.parametrize(("tied", "file_bytes"), [(True, 8192), (False, 2**32)], ids=["many files", "one file"])
def test_a_reloaded_export_is_bit_equal(
    tied: bool, file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_export, "FILE_BYTES", file_bytes)
    policy = trained(save_qwen3(tmp_path / "source", tied=tied))
    export(tmp_path / "source", state(policy).items(), tmp_path / "out", torch.float32)
    again = load(tmp_path / "out", mesh=None, device="cpu")
    inputs = batch(101).inputs
    assert torch.equal(again(**inputs, temperature=1.0)[0], policy(**inputs, temperature=1.0)[0])
    theirs = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in state(policy).items():
        assert torch.equal(theirs.state_dict()[name], tensor), name
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1 or file_bytes > 8192


def test_untrained_tensors_are_copied_and_a_stale_tied_head_is_dropped(tmp_path: Path) -> None:
    source = save_qwen3(tmp_path / "source")
    policy = trained(source)
    extra = {"model.visual.patch.weight": torch.randn(3, 5), "lm_head.weight": torch.randn(101, 32)}
    save_file(load_file(source / "model.safetensors") | extra, source / "model.safetensors")
    export(source, state(policy).items(), tmp_path / "out", torch.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.visual.patch.weight"], extra["model.visual.patch.weight"])
    assert "lm_head.weight" not in written
    assert written["model.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_without_a_dtype_each_tensor_keeps_the_dtype_of_the_source(tmp_path: Path) -> None:
    source = save_qwen3(tmp_path / "source")
    policy = trained(source)
    tensors = load_file(source / "model.safetensors")
    mixed = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(mixed, source / "model.safetensors")
    export(source, state(policy).items(), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {name: t.dtype for name, t in mixed.items()}


def test_an_unknown_tensor_is_rejected(tmp_path: Path) -> None:
    source = save_qwen3(tmp_path / "source")
    with pytest.raises(RunError, match="no tensor named model\\.extra"):
        export(source, [("model.extra", torch.zeros(1))], tmp_path / "out", None)

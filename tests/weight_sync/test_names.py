"""Tensors are sent under the names of the hub checkpoint, as the engine's loader for the family expects."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from app.model.load import load
from app.weight_sync.buckets import TensorMeta
from app.weight_sync.sender import Sender
from tests.model.support import save_qwen3, save_qwen35
from tests.weight_sync.support import rank_of


def described(path: Path) -> dict[str, TensorMeta]:
    sender = Sender(rank_of(load(path, mesh=None, device="cpu")))
    return {tensor.name: tensor for tensor in sender.describe()}


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_is_sent_under_the_names_of_its_checkpoint(tied: bool, tmp_path: Path) -> None:
    sent = described(save_qwen3(tmp_path, tied=tied))
    stored = load_file(tmp_path / "model.safetensors")
    assert set(sent) == set(stored) - ({"lm_head.weight"} if tied else set())
    assert all(sent[name].shape == tuple(stored[name].shape) for name in sent)
    assert {tensor.dtype for tensor in sent.values()} == {"bfloat16"}


def test_qwen35_is_sent_under_the_names_of_the_hub_checkpoint_without_vision(tmp_path: Path) -> None:
    """The hub checkpoint is the vision-language one: `model.language_model.*` beside `model.visual.*` and `mtp.*`."""
    sent = described(save_qwen35(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    text = {name for name in stored if not name.startswith(("model.visual.", "mtp."))}
    assert set(sent) == text
    float32 = {name for name, tensor in sent.items() if tensor.dtype == "float32"}
    assert float32 == {name for name in text if name.endswith(("A_log", "dt_bias"))}
    assert len(float32) == 2 * 3  # three linear layers of four

"""Parameters of adapters, counted from shapes and in models."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from app.config.model import LoraConfig
from app.model.architecture import QWEN3_4B, QWEN35_9B, adapter_parameters, from_config, trained_parameters
from app.model.load import load
from app.model.policy import named_trained_tensors
from tests.model.support import save_qwen3, save_qwen35


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "out_proj", "down_proj"]])
@pytest.mark.parametrize("save", [save_qwen3, save_qwen35])
def test_the_count_is_that_of_a_model(save: Callable[[Path], Path], targets: list[str], tmp_path: Path) -> None:
    path = save(tmp_path / "model")
    if save is save_qwen3:
        targets = [name for name in targets if name != "out_proj"]
    lora = LoraConfig(rank=4, targets=targets)
    shapes = from_config(json.loads((path / "config.json").read_text()))
    assert shapes is not None
    policy = load(path, mesh=None, device="cpu", lora=lora)
    trained = sum(tensor.numel() for _, tensor in named_trained_tensors(policy))
    assert adapter_parameters(shapes, lora) == trained_parameters(shapes, lora) == trained


def test_rank_32_is_one_or_two_percent_of_a_model() -> None:
    assert adapter_parameters(QWEN3_4B, LoraConfig(rank=32)) == 66_060_288
    assert trained_parameters(QWEN3_4B, LoraConfig()) == QWEN3_4B.parameters
    share = adapter_parameters(QWEN35_9B, LoraConfig(rank=32)) / QWEN35_9B.parameters
    assert 0.005 < share < 0.02

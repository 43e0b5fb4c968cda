"""Parameter counts match transformers; cache and state sizes match a hand calculation."""

import json
from pathlib import Path

import pytest

from app.config.model import Family, ModelConfig, TinyConfig
from app.model.architecture import QWEN3_4B, QWEN35_9B, architecture_of, from_config


def parameters_on_meta(config: object) -> int:
    import torch

    from app.model.hf_import import transformers

    with torch.device("meta"):
        return sum(p.numel() for p in transformers().AutoModelForCausalLM.from_config(config).parameters())


def test_qwen3_4b_has_as_many_parameters_as_in_transformers() -> None:
    from app.model.hf_import import transformers

    built = transformers().Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    assert QWEN3_4B.parameters == parameters_on_meta(built) == 4_022_468_096
    assert from_config(built.to_dict()) == QWEN3_4B


def test_qwen35_9b_has_as_many_parameters_as_in_transformers() -> None:
    from app.model.hf_import import transformers

    built = transformers().Qwen3_5TextConfig()
    assert QWEN35_9B.parameters == parameters_on_meta(built) == 8_953_803_264
    text_only = from_config(built.to_dict())
    assert text_only is not None
    assert text_only.parameters == QWEN35_9B.parameters
    assert text_only.full_layers == 8


def test_a_composite_checkpoint_counts_its_text_model_and_its_vision_tower() -> None:
    from app.model.hf_import import transformers

    text = transformers().Qwen3_5TextConfig().to_dict()
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    assert from_config(whole) == QWEN35_9B


def test_only_every_fourth_layer_of_qwen35_has_a_kv_cache() -> None:
    assert QWEN3_4B.kv_bytes_per_token(2) == 36 * 2 * 8 * 128 * 2 == 147_456
    assert QWEN35_9B.kv_bytes_per_token(2) == 8 * 2 * 4 * 256 * 2 == 32_768
    assert QWEN35_9B.kv_bytes_per_token(2, tensor_parallel=8) == 8 * 2 * 1 * 256 * 2  # at least one head per rank


def test_the_state_of_a_request_matches_a_hand_calculation() -> None:
    recurrent = 32 * 128 * 128 * 4  # value heads × key dim × value dim, float32
    convolution = (2 * 16 * 128 + 32 * 128) * 3 * 2  # channels × the last three inputs, bfloat16
    assert QWEN35_9B.state_bytes_per_request(2) == 24 * (recurrent + convolution) == 51_511_296
    assert QWEN35_9B.state_bytes_per_request(2, tensor_parallel=4) == 12_877_824
    assert QWEN3_4B.state_bytes_per_request(2) == 0


def test_the_tiny_model_is_counted_without_creating_it(tiny_model: Path) -> None:
    created = from_config(json.loads((tiny_model / "config.json").read_text()))
    assert architecture_of(ModelConfig()) == created
    assert created is not None
    assert created.parameters == 80_512


def test_the_tiny_qwen35_is_counted_without_creating_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.model.tiny.create import ensure

    monkeypatch.setattr("app.model.tiny.warmup.warm_up", lambda *_: 0.3)
    config = ModelConfig(tiny=TinyConfig(family=Family.qwen35, layers=5, cache=str(tmp_path)))
    created = from_config(json.loads((ensure(config, seed=0) / "config.json").read_text()))
    assert architecture_of(config) == created
    assert created is not None
    assert (created.layers, created.full_layers) == (5, 2)


def test_a_local_directory_is_read(tiny_model: Path) -> None:
    assert architecture_of(ModelConfig(path=str(tiny_model))) == architecture_of(ModelConfig())


@pytest.mark.parametrize("path", ["somebody/something", "/nowhere"])
def test_a_model_that_is_not_local_has_no_architecture(path: str) -> None:
    assert architecture_of(ModelConfig(path=path)) is None


def test_a_mixture_of_experts_is_not_counted_as_dense() -> None:
    assert from_config({"model_type": "qwen3_moe"}) is None

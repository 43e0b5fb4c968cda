"""Parameter counts match transformers; cache and state sizes match a hand calculation."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch

from app.config.model import LoraConfig, ModelConfig
from app.config.rollout import RolloutConfig
from app.device.torchvision_shim import transformers
from app.model.architecture import (
    QWEN3_4B,
    QWEN35_9B,
    adapter_parameters,
    architecture_of,
    context_tokens,
    draft_of,
    from_config,
    require_context,
    trained_parameters,
)
from app.model.load import load
from app.model.policy import named_trained_tensors
from tests.bench.random_model import QWEN3_4B as QWEN3_4B_CONFIG
from tests.model.support import save_qwen3, save_qwen35
from tests.refusals import refused


def test_known_models_have_the_parameters_of_transformers_and_those_published() -> None:
    qwen3 = transformers().Qwen3Config(**QWEN3_4B_CONFIG)
    assert QWEN3_4B.parameters == parameters_on_meta(qwen3) == 4_022_468_096
    assert from_config(qwen3.to_dict()) == QWEN3_4B

    text = transformers().Qwen3_5TextConfig()
    assert QWEN35_9B.parameters == parameters_on_meta(text) == 8_953_803_264
    alone = from_config(text.to_dict())
    assert alone is not None
    assert (alone.parameters, alone.full_layers) == (QWEN35_9B.parameters, 8)
    assert from_config({"model_type": "qwen3_moe"}) is None
    whole = {"text_config": text.to_dict(), "vision_config": {}, "tie_word_embeddings": False}
    assert from_config(whole) == QWEN35_9B  # with its vision tower

    for name, parameters in (("Qwen/Qwen3-0.6B", 596_049_920), ("Qwen/Qwen3-1.7B", 1_720_574_976)):
        known = architecture_of(ModelConfig(path=name))
        assert known is not None
        assert known.parameters == parameters


def parameters_on_meta(config: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in transformers().AutoModelForCausalLM.from_config(config).parameters())


def test_drafts_have_the_parameters_of_their_modules() -> None:
    shapes = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    layer = parameters_on_meta(transformers().Qwen3_5TextConfig(**shapes)) - QWEN35_9B.root_parameters
    head = draft_of(RolloutConfig(speculative="mtp"), QWEN35_9B)
    assert head is not None
    assert head.parameters(1) == layer + 2 * 4096 * 4096 + 3 * 4096  # mtp.layers, mtp.fc, three norms
    assert head.parameters(4) == layer / 4 + 2 * 4096 * 4096 + 3 * 4096
    assert head.shared == 2 * 248_320 * 4096


def test_an_eagle3_draft_has_the_parameters_of_its_tensors(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "target_hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    words = {"vocab_size": 100, "draft_vocab_size": 32, "architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **heads, **words}))
    projections = [(64, 192), (32, 192), (32, 192), (96, 64)]  # queries, keys and values of embedding and hidden state
    split = [*projections, (128, 96), (128, 96), (96, 128), (32, 96)]  # MLP, head
    whole = [(96, 3 * 64), (96,), (96,), (96,), (96,)]  # of three hidden states; norms
    policy = replace(QWEN3_4B, hidden=64, vocabulary=100)
    draft = draft_of(RolloutConfig(speculative=str(tmp_path)), policy)
    assert draft is not None
    assert (draft.sharded, draft.whole, draft.shared) == (*(sum(map(prod, each)) for each in (split, whole)), 9600)

    other = replace(policy, vocabulary=101)
    for path, of in ((str(tmp_path), other), (str(tmp_path / "none"), policy), ("mtp", policy)):
        with refused("rollout.speculative", path):
            draft_of(RolloutConfig(speculative=path), of)


def test_cache_and_state_of_a_request_match_a_hand_calculation() -> None:
    """Every fourth layer of Qwen3.5 has a KV cache, the others a state."""
    assert QWEN3_4B.kv_bytes_per_token(2) == 36 * 2 * 8 * 128 * 2
    assert QWEN35_9B.kv_bytes_per_token(2) == 8 * 2 * 4 * 256 * 2
    assert QWEN35_9B.kv_bytes_per_token(2, tensor_parallel=8) == 8 * 2 * 1 * 256 * 2  # at least one head per rank

    recurrent = 32 * 128 * 128 * 4  # value heads × key dim × value dim, float32
    convolution = (2 * 16 * 128 + 32 * 128) * 3 * 2  # channels × the last three inputs, bfloat16
    assert QWEN35_9B.state_bytes_per_request(2) == 24 * (recurrent + convolution)
    assert QWEN35_9B.state_bytes_per_request(2, tensor_parallel=4) == 6 * (recurrent + convolution)
    assert QWEN35_9B.state_bytes_per_request(2, item=2) == 24 * (recurrent // 2 + convolution)
    assert QWEN3_4B.state_bytes_per_request(2) == 0


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "out_proj", "down_proj"]])
@pytest.mark.parametrize("save", [save_qwen3, save_qwen35])
def test_the_adapters_of_a_model_are_counted(save: Callable[[Path], Path], targets: list[str], tmp_path: Path) -> None:
    path = save(tmp_path / "model")
    if save is save_qwen3:
        targets = [name for name in targets if name != "out_proj"]
    lora = LoraConfig(rank=4, targets=targets)
    shapes = from_config(json.loads((path / "config.json").read_text()))
    assert shapes is not None
    policy = load(path, mesh=None, device="cpu", lora=lora)
    trained = sum(tensor.numel() for _, tensor in named_trained_tensors(policy))
    assert adapter_parameters(shapes, lora) == trained_parameters(shapes, lora) == trained
    assert trained_parameters(shapes, LoraConfig()) == shapes.parameters


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 300}, "max_position_embeddings": 7}, 300),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131_072),
        ({"max_position_embeddings": 40_960, "rope_parameters": YARN}, 40_960),
        ({"hidden_size": 32}, None),
    ],
)
def test_the_context_is_the_one_that_sglang_derives(fields: dict[str, object], context: int | None) -> None:
    assert context_tokens(fields) == context


def test_lengths_beyond_the_context_are_refused_with_both_numbers() -> None:
    fields, after_1024 = {"max_position_embeddings": 2048}, partial(RolloutConfig, max_prompt_tokens=1024)
    require_context(after_1024(max_completion_tokens=1017), fields, "m")
    require_context(after_1024(max_completion_tokens=9999), {}, "m")
    for name in ("context-length", "context-len"):
        require_context(after_1024(max_completion_tokens=3065, engine_args={name: 4096}), fields, "m")

    with refused("rollout.max_completion_tokens", 1018, "at most 1017"):
        require_context(after_1024(max_completion_tokens=1018), fields, "m")
    with refused("rollout.max_prompt_tokens", 2041, "less than 2041"):
        require_context(RolloutConfig(max_prompt_tokens=2041, max_completion_tokens=1), fields, "m")

"""Checkpoints that `load` rejects, and buffers that it computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.model.hf_import import transformers
from app.model.load import _disable_dropout, load
from app.model.policy import named_checkpoint_tensors
from tests.model.support import (
    SAVE,
    batch,
    reference,
    save_bert,
    save_gpt2,
    save_phi,
    save_qwen3,
    save_with_changed_logits,
    save_with_dropout,
)
from tests.refusals import refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_qwen3(tmp_path / "qwen3")


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(path / "model.safetensors") | change
    remaining = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(remaining, path / "model.safetensors")


def test_parameters_and_computed_buffers_equal_those_of_transformers(path: Path) -> None:
    theirs = transformers().AutoModelForCausalLM.from_pretrained(path)
    ours = load(path, mesh=None, device="cpu")
    assert ours.training
    for name, parameter in named_checkpoint_tensors(ours):
        assert torch.equal(parameter, theirs.state_dict()[name]), name
    buffers = dict(ours.causal_lm.named_buffers())
    assert buffers.keys() == dict(theirs.named_buffers()).keys()
    for name, buffer in theirs.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "lacks model.layers.1.mlp.up_proj.weight."),
        ({f"adapter.{index}": torch.zeros(1) for index in range(7)}, "adapter.4 and 2 more"),
        ({"model.norm.weight": torch.ones(31)}, "model.norm.weight (31,) instead of (32,)"),
    ],
    ids=["missing", "unexpected", "another shape"],
)
def test_tensors_that_do_not_match_the_config_are_named(path: Path, change: Any, named: str) -> None:
    rewrite(path, change)
    with refused("model.path", path, named):
        load(path, mesh=None, device="cpu")


def test_a_stored_copy_of_a_tied_head_is_accepted(path: Path) -> None:
    rewrite(path, {"lm_head.weight": load_file(path / "model.safetensors")["model.embed_tokens.weight"].clone()})
    assert "lm_head.weight" not in dict(named_checkpoint_tensors(load(path, mesh=None, device="cpu")))


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("model.safetensors", "no tensors here", "safetensors"),
        ("config.json", '{"model_type": "no_such_model"}', "no_such_model"),
    ],
)
def test_a_broken_file_or_another_kind_of_model_is_refused(path: Path, file: str, content: str, named: str) -> None:
    (path / file).write_text(content)
    with refused("model.path", path, named):
        load(path, mesh=None, device="cpu")


@pytest.mark.parametrize("family", ["phi3", "starcoder2"])
def test_a_model_with_dropout_gives_the_same_logprobs_twice(family: str, tmp_path: Path) -> None:
    policy = load(save_with_dropout(family, tmp_path / family), mesh=None, device="cpu")
    assert policy.training

    inputs = batch(101, lengths=(60,)).inputs
    with torch.no_grad():
        first, second = (policy(**inputs, temperature=1.0)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    with refused("model.path", tmp_path / "phi", "bias"):
        load(save_phi(tmp_path / "phi"), mesh=None, device="cpu")


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2"])
def test_a_model_that_changes_its_logits_is_refused(family: str, tmp_path: Path) -> None:
    with refused("model.path", tmp_path / family, "ForCausalLM", "logits"):
        load(save_with_changed_logits(family, tmp_path / family), mesh=None, device="cpu")


@pytest.mark.parametrize("model", SAVE)
def test_an_accepted_model_computes_the_log_probabilities_of_transformers(model: str, tmp_path: Path) -> None:
    path = SAVE[model](tmp_path / model)
    policy = load(path, mesh=None, device="cpu")
    packed = batch(101)
    _, expected, _ = reference(path, packed, temperature=1.0)
    with torch.no_grad():
        torch.testing.assert_close(policy(**packed.inputs, temperature=1.0)[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("save", "kind"), [(save_gpt2, "GPT2LMHeadModel"), (save_bert, "BertLMHeadModel")])
def test_a_class_without_the_expected_parts_is_refused(save: Callable[[Path], Path], kind: str, tmp_path: Path) -> None:
    with refused("model.path", tmp_path / "model", kind, "`lm_head`", "`layers`"):
        load(save(tmp_path / "model"), mesh=None, device="cpu")


def test_dropout_is_disabled_in_every_nested_configuration() -> None:
    library = transformers()
    config = library.Blip2Config(
        text_config=library.OPTConfig(dropout=0.1).to_dict(),
        qformer_config={"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
        vision_config={"attention_dropout": 0.4},
    )
    _disable_dropout(config)
    assert config.text_config.dropout == 0.0
    assert (config.qformer_config.hidden_dropout_prob, config.qformer_config.attention_probs_dropout_prob) == (0, 0)
    assert config.vision_config.attention_dropout == 0.0


def test_mixed_precision_requires_a_mesh(path: Path) -> None:
    with pytest.raises(ValueError, match="without a mesh"):
        load(path, mesh=None, device="cpu", compute_dtype=torch.bfloat16)

"""Checkpoints that `load` rejects, and buffers that it computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.device.torchvision_shim import transformers
from app.model.load import _disable_dropout, load
from app.model.policy import named_checkpoint_tensors
from tests.model.support import batch, save_kind, save_qwen3
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


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("Phi3", {"attention_dropout": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
        ("Starcoder2", {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}),
    ],
)
def test_a_model_with_dropout_gives_the_same_logprobs_twice(kind: str, rates: dict[str, float], tmp_path: Path) -> None:
    policy = load(save_kind(kind, tmp_path / kind, **rates), mesh=None, device="cpu")
    assert policy.training

    inputs = batch(101, lengths=(60,)).inputs
    with torch.no_grad():
        first, second = (policy(**inputs, temperature=1.0)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("Phi", {}, ("bias",)),
        ("Granite", {"logits_scaling": 8.0}, ("GraniteForCausalLM", "logits")),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 30.0}, ("Gemma2ForCausalLM", "logits")),
        ("GPT2", {}, ("GPT2LMHeadModel", "`lm_head`", "`layers`")),  # its decoder has `h`
    ],
)
def test_a_class_whose_logits_are_not_those_of_its_head_is_refused(
    kind: str, settings: dict[str, Any], named: tuple[str, ...], tmp_path: Path
) -> None:
    path = save_kind(kind, tmp_path / kind, **settings)
    with refused("model.path", path, *named):
        load(path, mesh=None, device="cpu")


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

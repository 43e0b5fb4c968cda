"""A packed pass equals transformers on each sequence alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from app.config.trainer import Checkpointing
from app.model.load import load
from app.model.policy import PolicyModel
from tests.model.support import SAVE, batch, reference, relative, weights

TEMPERATURE = 0.7


@pytest.fixture(scope="module", params=SAVE)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SAVE[request.param](tmp_path_factory.mktemp(request.param))


def plain(path: Path, **options: Any) -> PolicyModel:
    return load(path, mesh=None, device="cpu", **options)


def test_packed_logprobs_and_entropies_equal_those_of_each_sequence_alone(path: Path) -> None:
    packed = batch(101)
    _, logprobs, entropies = reference(path, packed, TEMPERATURE)
    ours, our_entropies = plain(path)(**packed.inputs, temperature=TEMPERATURE)
    assert ours.dtype == our_entropies.dtype == torch.float32
    assert relative(ours, logprobs) < 1e-5
    assert relative(our_entropies, entropies) < 1e-5
    assert not our_entropies.requires_grad


def test_packed_gradients_with_recomputed_layers_equal_the_sum_over_sequences_alone(path: Path) -> None:
    packed = batch(101)
    model, logprobs, _ = reference(path, packed, TEMPERATURE)
    (logprobs * weights(packed)).sum().backward()
    policy = plain(path, activation_checkpointing=Checkpointing.all)
    ours, _ = policy(**packed.inputs, temperature=TEMPERATURE, chunk_tokens=7)
    (ours * weights(packed)).sum().backward()
    theirs = dict(model.named_parameters())
    for name, parameter in policy.causal_lm.named_parameters():
        assert relative(parameter.grad, theirs[name].grad) < 1e-5, name


def test_a_pass_without_completion_tokens_has_zero_gradients(path: Path) -> None:
    policy = plain(path)
    logprobs, _ = policy(**batch(101, (2,)).inputs, temperature=1.0)
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in policy.parameters())

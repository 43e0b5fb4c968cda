"""The loss as a sum of components, against transformers in float64, one sequence at a time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl
from app.config.model import LoraConfig
from app.types import ScoredGroup, TokenSequence
from tests.model.support import relative
from tests.trainer import plain
from tests.trainer.ranks import play_on
from tests.trainer.support import Scenario, demonstrations, play

GRPO = AlgorithmConfig(prompts_per_step=8, group_size=4)
ALGORITHMS = {
    "grpo": replace(GRPO, ce_coefficient=0.3),
    "token mean": replace(GRPO, aggregation=Aggregation.token_mean, ce_coefficient=0.3),
    "with a reference": replace(GRPO, kl=Kl.k3, kl_coefficient=0.1, entropy_coefficient=0.01, ce_coefficient=0.5),
}


@pytest.fixture(scope="module")
def imitated() -> list[TokenSequence]:
    return demonstrations(7)


def labels_loss(model: Any, sequences: Sequence[TokenSequence]) -> Tensor:
    """Return the loss that transformers computes from labels, averaged over the tokens of all sequences."""
    tokens = sum(len(each.logprobs) for each in sequences)
    total = torch.zeros((), dtype=torch.float64)
    for each in sequences:
        ids = torch.as_tensor(each.token_ids, dtype=torch.int64)[None]
        labels = torch.where(torch.as_tensor(each.sampled)[None], ids, -100)
        total = total + model(input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=tokens).loss
    return total


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_component_is_divided_by_its_own_count(
    name: str, path: Path, reference: Path, groups: list[ScoredGroup], imitated: list[TokenSequence]
) -> None:
    algorithm = ALGORITHMS[name]
    frozen = reference if algorithm.needs_reference else None
    ours = play(path, Scenario(algorithm, groups, budget=25, pieces=3, reference=frozen, demonstrations=imitated))

    model = plain.transformers_model(path)
    policy = plain.loss(
        model, groups, algorithm, Correction.none, reference=frozen and plain.transformers_model(frozen)
    )
    cross_entropy = labels_loss(model, imitated)
    assert ours.metrics["loss/ce"] == pytest.approx(cross_entropy.item(), rel=1e-5)
    plain.assert_step(ours, model, policy + algorithm.ce_coefficient * cross_entropy)


def test_demonstrations_alone_have_the_loss_of_transformers_with_labels(
    path: Path, imitated: list[TokenSequence]
) -> None:
    ours = play(path, Scenario(GRPO, [], demonstrations=imitated))
    model = plain.transformers_model(path)
    expected = labels_loss(model, imitated)
    assert ours.cross_entropy == pytest.approx(expected.item(), rel=1e-6)
    plain.assert_step(ours, model, expected)
    assert ours.metrics["trainer/tokens"] == sum(len(each.token_ids) for each in imitated)


def test_ranks_divide_by_the_counts_of_all_of_them(
    path: Path, groups: list[ScoredGroup], imitated: list[TokenSequence], tmp_path: Path
) -> None:
    scenarios = {
        "both": Scenario(replace(GRPO, ce_coefficient=0.3), groups, demonstrations=imitated),
        "alone": Scenario(GRPO, [], demonstrations=imitated[:3]),
        "adapters": Scenario(GRPO, [], demonstrations=imitated, lora=LoraConfig(rank=4), moved=True),
    }
    for name, result in play_on(2, path, scenarios, tmp_path / "out").items():
        alone = play(path, scenarios[name])
        assert result.metrics["loss/total"] == pytest.approx(alone.metrics["loss/total"], rel=1e-5)
        assert result.metrics["loss/ce"] == pytest.approx(alone.metrics["loss/ce"], rel=1e-5)
        assert result.cross_entropy == pytest.approx(alone.cross_entropy, rel=1e-6)
        for parameter, gradient in result.gradients[0].items():
            assert relative(gradient, alone.gradients[0][parameter]) < 1e-5, (name, parameter)


def test_demonstrations_are_spread_over_the_updates_of_a_step(
    path: Path, groups: list[ScoredGroup], imitated: list[TokenSequence]
) -> None:
    algorithm = replace(GRPO, updates_per_step=2)
    ours = play(path, Scenario(algorithm, groups, demonstrations=imitated))
    assert len(ours.gradients) == 2

    only_first = play(path, Scenario(replace(algorithm, updates_per_step=1), groups[:4], demonstrations=imitated[::2]))
    for parameter, gradient in ours.gradients[0].items():
        assert relative(gradient, only_first.gradients[0][parameter]) < 1e-5, parameter

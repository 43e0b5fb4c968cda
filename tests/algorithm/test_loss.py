"""Policy loss, gradient and metrics against the formulas of the papers, and identities between algorithms."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.algorithm.loss import binary_kl, policy_loss
from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl, OldPolicy, RatioLevel

from . import reference_loss
from .cases import LENGTHS, LIMIT, batch_of, random_case, update

CORRECTIONS = [Correction.none, Correction.tis, Correction.icepop, Correction.kpop, Correction.sequence_mask]
NARROW = AlgorithmConfig(clip_low=0.2, clip_high=0.28, correction_low=0.7, correction_high=1.3)
GRPO = AlgorithmConfig()
DAPO = AlgorithmConfig(clip_high=0.28, aggregation=Aggregation.token_mean)


def assert_matches_reference(case: reference_loss.Case, config: AlgorithmConfig, correction: Correction) -> None:
    """Loss, gradient and every metric equal the reference."""
    if correction is Correction.kpop:
        config = replace(config, correction_high=0.02)  # of a KL, in place of a weight
    result = update([case], config, correction)
    assert result.loss == pytest.approx(reference_loss.loss(case, config, correction, LIMIT), rel=1e-12, abs=1e-13)
    slopes = reference_loss.gradient(case, config, correction, LIMIT)
    assert result.gradient == pytest.approx(slopes, rel=1e-5, abs=1e-8)
    assert any(slopes)
    assert result.metrics["loss/total"] == pytest.approx(result.loss, rel=1e-12)
    terms = {"loss/total", "loss/policy", "loss/kl", "loss/entropy"}
    measured = {name: value for name, value in result.metrics.items() if name not in terms}
    assert measured == pytest.approx(reference_loss.metrics(case, config, correction), rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("aggregation", Aggregation)
def test_token_level_loss_gradient_and_metrics_equal_the_papers(
    aggregation: Aggregation, correction: Correction
) -> None:
    config = replace(NARROW, aggregation=aggregation, dual_clip=1.5, kl=Kl.k3, kl_coefficient=0.04)
    assert_matches_reference(random_case(0), replace(config, entropy_coefficient=0.01), correction)


def test_kpop_has_a_wide_band_for_rare_tokens_and_a_narrow_one_for_likely_ones() -> None:
    """Certain tokens have a finite divergence."""
    one, other = torch.tensor([1e-3, 0.5, 0.9, 1.0, 1.0]).log(), torch.tensor([5e-3, 0.7, 0.5, 1.0, 0.5]).log()
    found = binary_kl(one, other)
    pairs = zip(one.tolist(), other.tolist(), strict=True)
    expected = [max(reference_loss.binary_kl(p, q), reference_loss.binary_kl(q, p)) for p, q in pairs]
    assert found.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert [value <= 0.1 for value in expected] == [True, True, False, True, False]


@pytest.mark.parametrize("correction", [Correction.none, Correction.sequence_mask])
@pytest.mark.parametrize("aggregation", Aggregation)
def test_sequence_level_loss_gradient_and_metrics_equal_gspo(aggregation: Aggregation, correction: Correction) -> None:
    config = replace(NARROW, ratio=RatioLevel.sequence, aggregation=aggregation, clip_low=0.1, clip_high=0.15)
    assert_matches_reference(random_case(0, LENGTHS * 2, spread=0.3), config, correction)


def test_k2_equals_its_formula() -> None:
    assert_matches_reference(random_case(3), replace(GRPO, kl=Kl.k2, kl_coefficient=0.5), Correction.none)


def test_the_ratio_uses_rollout_logprobs_if_the_rollout_is_the_old_policy() -> None:
    config = replace(NARROW, old_policy=OldPolicy.rollout)
    case = random_case(4)
    assert_matches_reference(case, config, Correction.none)
    moved = [replace(s, trainer_old=[value - 1 for value in s.trainer_old]) for s in case]
    assert update([moved], config, Correction.none).gradient == update([case], config, Correction.none).gradient


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_equals_reinforce() -> None:
    case = random_case(5, on_policy=True, masked=0)
    result = update([case], DAPO, Correction.none, recompute_old=False)
    tokens = sum(LENGTHS)
    expected = [-sequence.advantage / tokens for sequence in case for _ in sequence.logprobs]
    assert result.gradient == pytest.approx(expected, rel=1e-12)
    assert result.metrics["ratio/min"] == result.metrics["ratio/mean"] == result.metrics["ratio/max"] == 1
    assert result == update([case], DAPO, Correction.none, recompute_old=True)


def test_gspo_with_a_token_level_correction_weights_the_gradient_of_each_token() -> None:
    config = replace(NARROW, ratio=RatioLevel.sequence, clip_low=0.9, clip_high=9.0)
    case = random_case(6, masked=0)
    expected = [
        -weight * reference_loss.sequence_ratio(s, s.trainer_old) * s.advantage / len(s) / len(case)
        for s in case
        for weight in reference_loss.corrections(s, config, Correction.tis)
    ]
    assert update([case], config, Correction.tis).gradient == pytest.approx(expected, rel=1e-12)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    splits=st.lists(st.integers(0, len(LENGTHS)), max_size=5).map(sorted),
    aggregation=st.sampled_from(Aggregation),
    level=st.sampled_from(RatioLevel),
    correction=st.sampled_from(CORRECTIONS),
)
def test_the_split_into_microbatches_changes_nothing(
    seed: int, splits: list[int], aggregation: Aggregation, level: RatioLevel, correction: Correction
) -> None:
    config = replace(NARROW, aggregation=aggregation, ratio=level, kl=Kl.k3, kl_coefficient=0.1, dual_clip=2.0)
    case = random_case(seed)
    edges = [0, *splits, len(case)]  # equal edges make empty microbatches
    pieces = [case[start:end] for start, end in pairwise(edges)]
    whole = update([case], config, correction)
    split = update(pieces, config, correction)
    assert split.loss == pytest.approx(whole.loss, rel=1e-10, abs=1e-12)
    assert split.gradient == pytest.approx(whole.gradient, rel=1e-10, abs=1e-12)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-10, abs=1e-12)


def test_enormous_log_ratios_stay_finite() -> None:
    case = [
        replace(s, trainer_old=[v - 500 for v in s.logprobs], rollout=[v + 500 for v in s.logprobs])
        for s in random_case(13)
    ]
    for correction in CORRECTIONS:
        result = update([case], replace(GRPO, kl=Kl.k3, kl_coefficient=1.0), correction)
        assert all(map(math.isfinite, [result.loss, *result.gradient, *result.metrics.values()]))


def test_a_batch_of_empty_sequences_is_harmless() -> None:
    for level in RatioLevel:
        result = update([random_case(14, lengths=(0, 0))], replace(NARROW, ratio=level), Correction.sequence_mask)
        assert result.gradient == []
        assert set(result.metrics.values()) == {0.0}


def test_single_precision_is_close_to_double() -> None:
    double = batch_of(random_case(15), GRPO)
    floats = {
        each.name: value.detach().float()
        for each in fields(double)
        if isinstance(value := getattr(double, each.name), torch.Tensor) and value.is_floating_point()
    }
    single = replace(double, **floats)  # type: ignore[arg-type]
    single.logprobs.requires_grad_()
    slopes = []
    for batch in (single, double):
        policy_loss(batch, GRPO, Correction.tis).loss.backward()
        assert batch.logprobs.grad is not None
        assert batch.logprobs.grad.dtype == batch.advantages.dtype
        slopes.append(batch.logprobs.grad.tolist())
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-5)


def test_an_unresolved_correction_is_rejected() -> None:
    with pytest.raises(ValueError, match="must be resolved first"):
        policy_loss(batch_of(random_case(16), GRPO), GRPO, Correction.auto)

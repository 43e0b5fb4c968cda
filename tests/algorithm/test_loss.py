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
NARROW = AlgorithmConfig(
    clip_low=0.2,
    clip_high=0.28,
    correction_low=0.7,
    correction_high=1.3,
)
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


@pytest.mark.parametrize("kind", [Kl.k2, Kl.k3])
def test_each_kl_estimator_equals_its_formula_and_only_changes_the_loss_term(kind: Kl) -> None:
    config = replace(GRPO, kl=kind, kl_coefficient=0.5)
    case = random_case(3)
    assert_matches_reference(case, config, Correction.none)
    with_kl, without = update([case], config, Correction.none), update([case], GRPO, Correction.none)
    assert with_kl.metrics["loss/policy"] == pytest.approx(without.loss, rel=1e-12)
    assert with_kl.metrics["loss/kl"] == pytest.approx(with_kl.loss - without.loss, rel=1e-9)


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


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    config = replace(GRPO, dual_clip=3.0, aggregation=Aggregation.seq_mean_token_sum)
    token = reference_loss.Tokens([0.0], [-2.0], [-2.0], [0.0], [0.0], advantage=-1.0, unmasked=True)  # ratio e² ≈ 7.4
    down = update([[token]], config, Correction.none)
    assert (down.loss, down.gradient, down.metrics["clip/dual_fraction"]) == (3.0, [0.0], 1)
    up = update([[replace(token, advantage=1.0)]], config, Correction.none)
    assert (up.loss, up.gradient) == (-1.2, [0.0])  # the upper clip
    assert update([[token]], GRPO, Correction.none).loss == pytest.approx(math.exp(2))


# Identities


def test_gspo_at_length_one_is_token_level() -> None:
    case = random_case(8, lengths=(1,) * 12)
    for correction in CORRECTIONS:
        sequence = update([case], replace(NARROW, ratio=RatioLevel.sequence), correction)
        token = update([case], NARROW, correction)
        assert sequence.loss == pytest.approx(token.loss, rel=1e-12)
        assert sequence.gradient == pytest.approx(token.gradient, rel=1e-12)


def test_aggregations_agree_on_equal_lengths() -> None:
    case = random_case(9, lengths=(LIMIT,) * 5)
    results = {kind: update([case], replace(NARROW, aggregation=kind), Correction.tis) for kind in Aggregation}
    mean = results[Aggregation.token_mean]
    for kind in (Aggregation.seq_mean_token_mean, Aggregation.seq_mean_token_sum_norm):
        assert results[kind].loss == pytest.approx(mean.loss, rel=1e-12)
        assert results[kind].gradient == pytest.approx(mean.gradient, rel=1e-12)
    summed = results[Aggregation.seq_mean_token_sum]
    assert summed.gradient == pytest.approx([LIMIT * value for value in mean.gradient], rel=1e-12)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_vanish_if_rollout_and_trainer_agree(correction: Correction) -> None:
    case = [replace(sequence, rollout=sequence.trainer_old) for sequence in random_case(10)]
    corrected, plain = update([case], GRPO, correction), update([case], GRPO, Correction.none)
    assert corrected == plain
    assert corrected.metrics["mismatch/kl"] == corrected.metrics["mismatch/masked_fraction"] == 0
    assert corrected.metrics["mismatch/max_ratio"] == 1
    assert corrected.metrics["mismatch/effective_sample_size"] == pytest.approx(1, rel=1e-12)


# Invariants


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


def test_masked_sequences_contribute_no_gradient_and_still_count() -> None:
    config = replace(DAPO, kl=Kl.k3, kl_coefficient=0.1)
    case = random_case(11, lengths=(3, 5), masked=0)
    masked = [case[0], replace(case[1], unmasked=False)]
    whole, half = update([case], config, Correction.none), update([masked], config, Correction.none)
    assert half.gradient == [*whole.gradient[:3], *[0.0] * 5]
    assert half.metrics["entropy"] == whole.metrics["entropy"]
    assert half.metrics["ratio/max"] == whole.metrics["ratio/max"]


def test_a_masking_correction_does_not_shrink_its_own_denominator() -> None:
    config = replace(DAPO, correction_low=0.9, correction_high=1.1)
    case = random_case(12, lengths=(4,), masked=0)
    case = [replace(case[0], trainer_old=case[0].logprobs, rollout=[*case[0].logprobs[:3], case[0].logprobs[3] - 3])]
    weights = reference_loss.corrections(case[0], config, Correction.icepop)
    assert weights == [1, 1, 1, 0]
    result = update([case], config, Correction.icepop)
    assert result.gradient == pytest.approx([-case[0].advantage / 4 * weight for weight in weights], rel=1e-12)
    assert result.metrics["mismatch/masked_fraction"] == 0.25


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

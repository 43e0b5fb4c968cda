"""Sizes and corrections of the presets; contradictory settings are refused, each in one sentence."""

import pytest

from app.config import RunConfig
from app.config.algorithm import AlgorithmConfig, Correction, Kl, OldPolicy
from app.config.reward import RewardConfig
from tests.compose import composed
from tests.refusals import refused


def test_dapo_at_the_papers_sizes_has_the_papers_step() -> None:
    sizes = ("algorithm.prompts_per_step=512", "algorithm.group_size=16", "rollout.max_completion_tokens=20480")
    config = composed("algorithm=dapo", *sizes).algorithm
    assert config.updates_per_step == 16
    assert config.prompts_per_update * config.group_size == 512
    assert config.overlong_buffer_tokens(20480) == 4096


def test_old_logprobs_need_a_forward_only_for_several_updates_against_the_trainer() -> None:
    assert not AlgorithmConfig(updates_per_step=1).needs_old_logprobs
    assert AlgorithmConfig(updates_per_step=2).needs_old_logprobs
    assert not AlgorithmConfig(updates_per_step=2, old_policy=OldPolicy.rollout).needs_old_logprobs


REFUSED = [
    (AlgorithmConfig(group_size=1), "algorithm.group_size=1", "at least 2"),
    (AlgorithmConfig(prompts_per_step=0), "algorithm.prompts_per_step=0", "at least 1"),
    (AlgorithmConfig(prompts_per_step=10, updates_per_step=4), "algorithm.updates_per_step=4", "prompts_per_step=10"),
    (AlgorithmConfig(updates_per_step=0), "algorithm.updates_per_step=0", "at least 1"),
    (AlgorithmConfig(clip_low=-0.1), "algorithm.clip_low=-0.1", "from 0 to 1"),
    (AlgorithmConfig(clip_low=1.1), "algorithm.clip_low=1.1", "from 0 to 1"),
    (AlgorithmConfig(clip_high=-0.1), "algorithm.clip_high=-0.1", "at least 0"),
    (AlgorithmConfig(clip_high=float("nan")), "algorithm.clip_high=nan", "at least 0"),
    (AlgorithmConfig(dual_clip=1.0), "algorithm.dual_clip=1.0", "above 1"),
    (AlgorithmConfig(kl=Kl.k3, kl_coefficient=-1.0), "algorithm.kl_coefficient=-1.0", "at least 0"),
    (AlgorithmConfig(kl_coefficient=0.04), "algorithm.kl_coefficient=0.04", "algorithm.kl=k2 or k3"),
    (AlgorithmConfig(entropy_coefficient=-0.1), "algorithm.entropy_coefficient=-0.1", "at least 0"),
    (AlgorithmConfig(tis_max=0.0), "algorithm.tis_max=0.0", "above 0"),
    (AlgorithmConfig(icepop_low=6.0), "algorithm.icepop_low=6.0", "algorithm.icepop_high=5.0"),
    (AlgorithmConfig(kpop_threshold=0.0), "algorithm.kpop_threshold=0.0", "above 0"),
    (AlgorithmConfig(sequence_mask_low=0.0), "algorithm.sequence_mask_low=0.0", "above 0"),
    (AlgorithmConfig(sequence_mask_low=2.0), "algorithm.sequence_mask_low=2.0", "algorithm.sequence_mask_high=1.001"),
    (AlgorithmConfig(overlong_buffer_fraction=1.5), "algorithm.overlong_buffer_fraction=1.5", "a fraction from 0 to 1"),
    (AlgorithmConfig(overlong_buffer_fraction=-0.1), "algorithm.overlong_buffer_fraction=-0.1", "from 0 to 1"),
    (AlgorithmConfig(overlong_penalty=-1.0), "algorithm.overlong_penalty=-1.0", "at least 0"),
    (AlgorithmConfig(max_refill_rounds=0), "algorithm.max_refill_rounds=0", "at least 1"),
    (
        AlgorithmConfig(old_policy=OldPolicy.rollout, correction=Correction.tis),
        "algorithm.correction=tis",
        "algorithm.old_policy=rollout",
    ),
]


@pytest.mark.parametrize(("config", "setting", "accepted"), REFUSED, ids=[setting for _, setting, _ in REFUSED])
def test_wrong_settings_are_refused(config: AlgorithmConfig, setting: str, accepted: str) -> None:
    run = RunConfig(algorithm=config, reward=RewardConfig(components={"exact": 1.0}))
    with refused(*setting.split("=", 1), accepted):
        run.validate()


def test_streaming_with_several_updates_is_refused() -> None:
    with refused("placement.stream", "on", "algorithm.updates_per_step=2"):
        composed("placement=fully_async", "placement.stream=on", "algorithm.updates_per_step=2")


def test_the_correction_is_none_in_colocate_and_tis_where_staleness_can_be_above_zero() -> None:
    assert composed().correction is Correction.none
    stale = ["placement=fully_async", "placement.max_staleness=2"]
    assert composed(*stale).correction is Correction.tis
    assert composed(*stale, "algorithm.old_policy=rollout").correction is Correction.none
    assert composed(*stale, "algorithm.correction=icepop").correction is Correction.icepop

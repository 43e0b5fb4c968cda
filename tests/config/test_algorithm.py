"""Sizes and corrections of the presets; contradictory settings are refused, each in one sentence."""

import pytest

from app.config import RunConfig
from app.config.algorithm import AlgorithmConfig, Correction, OldPolicy
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


REFUSED = [  # contradictions; tests/config/test_setting.py has the bounds
    (AlgorithmConfig(prompts_per_step=10, updates_per_step=4), "algorithm.updates_per_step=4", "prompts_per_step=10"),
    (AlgorithmConfig(kl_coefficient=0.04), "algorithm.kl_coefficient=0.04", "algorithm.kl=k2 or k3"),
    (
        AlgorithmConfig(correction=Correction.icepop, correction_low=6.0),
        "algorithm.correction_low=6.0",
        "algorithm.correction_high=5",
    ),
    (
        AlgorithmConfig(old_policy=OldPolicy.rollout, correction=Correction.tis),
        "algorithm.correction=tis",
        "algorithm.old_policy=rollout",
    ),
]


@pytest.mark.parametrize(("config", "setting", "accepted"), REFUSED, ids=[setting for _, setting, _ in REFUSED])
def test_settings_that_contradict_each_other_are_refused(config: AlgorithmConfig, setting: str, accepted: str) -> None:
    run = RunConfig(algorithm=config, reward=RewardConfig(components={"exact": 1.0}))
    with refused(*setting.split("=", 1), accepted):
        run.validate()

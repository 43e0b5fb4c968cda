"""Sizes of the presets, and when old log-probabilities need a forward."""

from app.config.algorithm import AlgorithmConfig, OldPolicy
from tests.compose import composed


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

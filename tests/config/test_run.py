"""Composition of every choice, and what follows from the composed settings."""

import re

import pytest

from app.config.algorithm import AlgorithmConfig, Correction, OldPolicy
from app.device import device_of
from app.rollout.engine.server_args import engine_flags
from app.types import InFlight
from tests.compose import composed
from tests.warm import run_warm


@pytest.mark.parametrize("stop", [[], ["END"]])
def test_engines_get_a_tokenizer_for_stop_strings(stop: list[str]) -> None:
    config = composed(f"rollout.stop={stop}")
    assert engine_flags(config, device_of(config.device.kind))["skip-tokenizer-init"] == (not stop)


def test_a_decay_lasts_for_all_updates_of_all_steps() -> None:
    assert composed("algorithm=dapo", "steps=5").optimizer_updates == 5 * 16


def test_old_logprobs_need_a_forward_only_for_several_updates_against_the_trainer() -> None:
    assert not AlgorithmConfig(updates_per_step=1).needs_old_logprobs
    assert AlgorithmConfig(updates_per_step=2).needs_old_logprobs
    assert not AlgorithmConfig(updates_per_step=2, old_policy=OldPolicy.rollout).needs_old_logprobs


OPENENV = ["model=qwen3_4b", "environment=openenv", "environment.url=ws://here"]


@pytest.mark.parametrize(
    ("overrides", "data", "reward"),
    [
        ([], "arithmetic", "exact"),
        (["model=qwen3_4b"], "dapo_math", "math"),
        (["model=qwen3_4b", "data=mbpp", "reward=exact"], "mbpp", "exact"),
        (["environment=verifiers", "environment.id=x"], "environment", "environment"),
        (["environment=verifiers", "environment.id=x", "model=qwen3_4b"], "environment", "environment"),
        (["model=hf", "model.path=a/b", "environment=verifiers", "environment.id=x"], "environment", "environment"),
        (OPENENV, "dapo_math", "environment"),
        ([*OPENENV, "reward=exact"], "dapo_math", "exact"),
        (["model=qwen3_4b", "environment=tools", "environment.tools=[my.tool]"], "dapo_math", "math"),
    ],
)
def test_data_and_environment_select_the_reward_unless_it_is_given(
    overrides: list[str], data: str, reward: str
) -> None:
    config = composed(*overrides)
    assert (config.data.name, [*config.reward.components]) == (data, [reward])


def test_the_correction_follows_from_staleness_unless_it_is_set() -> None:
    assert composed().correction is Correction.none
    assert composed("placement=fully_async").correction is Correction.tis
    assert composed("placement.max_staleness=1").correction is Correction.tis
    assert composed("placement=fully_async", "placement.max_staleness=0").correction is Correction.none
    assert composed("placement=fully_async", "algorithm.old_policy=rollout").correction is Correction.none
    assert composed("placement=fully_async", "algorithm.correction=icepop").correction is Correction.icepop


@pytest.mark.parametrize(
    ("overrides", "keeps_cache", "in_flight"),
    [
        ([], True, InFlight.drain),
        (["placement.max_staleness=1"], True, InFlight.retract),  # its memory is released
        (["placement=fully_async"], True, InFlight.in_place),
        (["placement=fully_async"], False, InFlight.retract),
        (["placement=fully_async", "placement.in_flight=drain"], True, InFlight.drain),
        (["placement=fully_async", "placement.max_staleness=0"], True, InFlight.drain),
    ],
)
def test_requests_in_flight_keep_their_cache_where_memory_and_model_allow_it(
    overrides: list[str], keeps_cache: bool, in_flight: InFlight
) -> None:
    assert composed(*overrides).placement.in_flight_or_default(keeps_cache=keeps_cache) is in_flight


def test_streaming_is_on_where_it_is_possible() -> None:
    assert composed("placement=fully_async").stream
    assert not composed("placement=fully_async", "algorithm.updates_per_step=2").stream
    assert not composed("placement=fully_async", "placement.stream=off").stream
    assert not composed().stream


def test_help_and_the_printed_configuration_are_of_the_composition_and_need_no_heavy_library() -> None:
    line = ["device=npu", "algorithm.clip_high=0.3", "data.prefix=$"]
    helped = run_warm(*line, "--help")
    assert re.search(r"^  device\.kind = npu +one of cpu, cuda, npu$", helped.stdout, re.MULTILINE)
    assert re.search(r"^  algorithm\.clip_high = 0\.3 +a number of at least 0$", helped.stdout, re.MULTILINE)
    assert re.search(r"^  data\.prefix = \$ +text$", helped.stdout, re.MULTILINE)
    assert "algorithm: cispo, dapo, dppo, dr_grpo, grpo, gspo, maxrl, opd, rloo, sapo" in helped.stdout
    assert helped.stdout.startswith("python -m app: ")

    printed = run_warm(*line, "--cfg", "job")
    assert "\n  clip_high: 0.3\n" in printed.stdout
    assert helped.heavy == printed.heavy == []

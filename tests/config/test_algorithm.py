"""Every preset composes with every model and matches its paper; contradictory settings get one sentence each."""

import pytest

from app.config import RunConfig
from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl, OldPolicy, RatioLevel
from app.config.reward import RewardConfig
from app.errors import ConfigError
from tests.compose import composed

ALGORITHMS = ["grpo", "dapo", "dr_grpo", "gspo"]
MODELS = ["tiny", "tiny_qwen35", "qwen3_4b", "qwen35_9b"]


def differences(config: AlgorithmConfig) -> dict[str, object]:
    """The settings that differ from the defaults, except for the sizes, which a model may set."""
    default = AlgorithmConfig()
    sizes = {"group_size", "prompts_per_step", "updates_per_step"}
    names = [name for name in AlgorithmConfig.__dataclass_fields__ if name not in sizes]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_preset_composes_with_every_model(algorithm: str, model: str) -> None:
    config = composed(f"algorithm={algorithm}", f"model={model}")
    assert config.algorithm.name == algorithm
    limit = config.rollout.max_completion_tokens
    assert 0 <= config.algorithm.overlong_buffer_tokens(limit) <= limit
    assert (config.algorithm.overlong_buffer_tokens(limit) > 0) == (algorithm == "dapo")


def test_presets_differ_from_grpo_in_what_their_papers_changed() -> None:
    changed = {name: differences(composed(f"algorithm={name}").algorithm) for name in ALGORITHMS}
    assert changed == {
        "grpo": {},
        "dapo": {
            "name": "dapo",
            "clip_high": 0.28,
            "aggregation": Aggregation.token_mean,
            "dynamic_sampling": True,
            "overlong_buffer_fraction": 0.2,
        },
        "dr_grpo": {
            "name": "dr_grpo",
            "normalize_by_std": False,
            "aggregation": Aggregation.seq_mean_token_sum_norm,
        },
        "gspo": {"name": "gspo", "ratio": RatioLevel.sequence, "clip_low": 3e-4, "clip_high": 4e-4},
    }


def test_dapo_at_the_papers_sizes_has_the_papers_step() -> None:
    config = composed(
        "algorithm=dapo",
        "algorithm.prompts_per_step=512",
        "algorithm.group_size=16",
        "algorithm.updates_per_step=16",
        "rollout.max_completion_tokens=20480",
    ).algorithm
    assert config.trajectories_per_step == 8192
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
    (AlgorithmConfig(clip_low=-0.1), "algorithm.clip_low=-0.1", "at least 0 and below 1"),
    (AlgorithmConfig(clip_low=1.0), "algorithm.clip_low=1.0", "at least 0 and below 1"),
    (AlgorithmConfig(clip_high=-0.1), "algorithm.clip_high=-0.1", "at least 0"),
    (AlgorithmConfig(clip_high=float("nan")), "algorithm.clip_high=nan", "at least 0"),
    (AlgorithmConfig(dual_clip=1.0), "algorithm.dual_clip=1.0", "above 1"),
    (AlgorithmConfig(kl=Kl.k3, kl_coefficient=-1.0), "algorithm.kl_coefficient=-1.0", "at least 0"),
    (AlgorithmConfig(kl_coefficient=0.04), "algorithm.kl_coefficient=0.04", "algorithm.kl=k1, k2 or k3"),
    (AlgorithmConfig(entropy_coefficient=-0.1), "algorithm.entropy_coefficient=-0.1", "at least 0"),
    (AlgorithmConfig(tis_max=0.0), "algorithm.tis_max=0.0", "above 0"),
    (AlgorithmConfig(icepop_low=6.0), "algorithm.icepop_low=6.0", "algorithm.icepop_high=5.0"),
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
def test_wrong_settings_are_refused_with_one_sentence(config: AlgorithmConfig, setting: str, accepted: str) -> None:
    run = RunConfig(algorithm=config, reward=RewardConfig(components={"exact": 1.0}))
    with pytest.raises(ConfigError) as error:
        run.validate()

    sentence = str(error.value)
    assert sentence.startswith(f"{setting} is not accepted: give ")
    assert accepted in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_streaming_with_several_updates_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^placement.stream=on is not accepted: .*algorithm.updates_per_step=2"):
        composed("placement=fully_async", "placement.stream=on", "algorithm.updates_per_step=2")


def test_the_correction_is_none_in_colocate_and_tis_where_staleness_can_be_above_zero() -> None:
    assert composed().correction is Correction.none
    stale = ["placement=fully_async", "placement.max_staleness=2"]
    assert composed(*stale).correction is Correction.tis
    assert composed(*stale, "algorithm.old_policy=rollout").correction is Correction.none
    assert composed(*stale, "algorithm.correction=icepop").correction is Correction.icepop

"""Settings of `algorithm=`, and the table of old policy and correction.

ratio = π / π_old; the gradient is multiplied by a weight made of w = π_old(trainer) / π_sampler.

| old_policy | π_old                               | correction    | weight                                        |
|------------|-------------------------------------|---------------|-----------------------------------------------|
| trainer    | the trainer's, when the step begins | none          | 1                                             |
| trainer    |                                     | tis           | min(w, tis_max): decoupled PPO                |
| trainer    |                                     | icepop        | w inside icepop_low … icepop_high, else 0     |
| trainer    |                                     | sequence_mask | 1 where the sequence's w is in bounds, else 0 |
| sampler    | the engine's                        | none          | 1: π_old is the sampler itself                |

A sequence's w is the geometric mean of its tokens'. The weight multiplies the policy term, not the KL term and not the
entropy bonus. One update a step needs no forward for π_old: it is the current policy, detached.
"""

from dataclasses import dataclass
from enum import Enum

from app.errors import expect


class RatioLevel(Enum):
    token = "token"
    sequence = "sequence"  # GSPO: one length-normalised ratio per sequence


class Aggregation(Enum):
    """How per-token losses become one number."""

    token_mean = "token_mean"  # DAPO
    seq_mean_token_mean = "seq_mean_token_mean"  # GRPO paper
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"  # Dr. GRPO: divided by max_completion_tokens


class Kl(Enum):
    """Estimator of the KL divergence to the frozen reference that is added to the loss."""

    none = "none"
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class OldPolicy(Enum):
    trainer = "trainer"
    rollout = "rollout"


class Correction(Enum):
    auto = "auto"  # none where every trajectory is on-policy, tis where staleness can be above 0
    none = "none"
    tis = "tis"
    icepop = "icepop"
    sequence_mask = "sequence_mask"


@dataclass
class AlgorithmConfig:
    name: str = "grpo"
    group_size: int = 8  # trajectories per prompt
    prompts_per_step: int = 32  # groups
    updates_per_step: int = 1  # optimizer updates; divides prompts_per_step
    normalize_by_std: bool = True  # advantage = (r - mean) / std of the group; without: r - mean
    ratio: RatioLevel = RatioLevel.token
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # bound on the loss of negative advantages, above 1
    aggregation: Aggregation = Aggregation.seq_mean_token_mean
    kl: Kl = Kl.none
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    old_policy: OldPolicy = OldPolicy.trainer
    correction: Correction = Correction.auto
    tis_max: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    sequence_mask_low: float = 0.99
    sequence_mask_high: float = 1.001
    overlong_buffer_fraction: float = (
        0.0  # of rollout.max_completion_tokens: soft punishment over the last of them; 0 is off
    )
    overlong_penalty: float = 1.0  # the punishment at the limit
    mask_truncated: bool = False  # truncated completions earn no gradient
    dynamic_sampling: bool = False  # drop groups whose raw rewards are all equal, and refill
    max_refill_rounds: int = 10  # then train on what is there

    @property
    def prompts_per_update(self) -> int:
        return self.prompts_per_step // self.updates_per_step

    @property
    def trajectories_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a step begins with an extra forward: with one update, π_old is the current policy, detached."""
        return self.old_policy is OldPolicy.trainer and self.updates_per_step > 1

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy computes log-probabilities too."""
        return self.kl is not Kl.none

    def overlong_buffer_tokens(self, max_completion_tokens: int) -> int:
        """The last tokens before the limit, over which the soft punishment grows."""
        return round(self.overlong_buffer_fraction * max_completion_tokens)


def validate(config: AlgorithmConfig, *, max_completion_tokens: int) -> None:
    """Raise `ConfigError` for settings that cannot be run or contradict each other."""
    name = "algorithm."
    expect(config.group_size >= 2, name + "group_size", config.group_size, "a whole number of at least 2")
    expect(
        config.prompts_per_step >= 1, name + "prompts_per_step", config.prompts_per_step, "a whole number of at least 1"
    )
    expect(
        config.updates_per_step >= 1 and config.prompts_per_step % config.updates_per_step == 0,
        name + "updates_per_step",
        config.updates_per_step,
        f"a divisor of algorithm.prompts_per_step={config.prompts_per_step}",
    )
    expect(0 <= config.clip_low < 1, name + "clip_low", config.clip_low, "a number of at least 0 and below 1")
    expect(config.clip_high >= 0, name + "clip_high", config.clip_high, "a number of at least 0")
    expect(
        config.dual_clip is None or config.dual_clip > 1,
        name + "dual_clip",
        config.dual_clip,
        "null or a number above 1",
    )
    expect(config.kl_coefficient >= 0, name + "kl_coefficient", config.kl_coefficient, "a number of at least 0")
    expect(
        config.kl is not Kl.none or config.kl_coefficient == 0,
        name + "kl_coefficient",
        config.kl_coefficient,
        "0, or an estimator with algorithm.kl=k1, k2 or k3",
    )
    expect(
        config.entropy_coefficient >= 0,
        name + "entropy_coefficient",
        config.entropy_coefficient,
        "a number of at least 0",
    )
    expect(config.tis_max > 0, name + "tis_max", config.tis_max, "a number above 0")
    expect(
        0 < config.icepop_low < config.icepop_high,
        name + "icepop_low",
        config.icepop_low,
        f"a number between 0 and algorithm.icepop_high={config.icepop_high}",
    )
    expect(
        0 < config.sequence_mask_low < config.sequence_mask_high,
        name + "sequence_mask_low",
        config.sequence_mask_low,
        f"a number between 0 and algorithm.sequence_mask_high={config.sequence_mask_high}",
    )
    expect(
        0 <= config.overlong_buffer_fraction <= 1,
        name + "overlong_buffer_fraction",
        config.overlong_buffer_fraction,
        f"a fraction from 0 to 1 of rollout.max_completion_tokens={max_completion_tokens}",
    )
    expect(config.overlong_penalty >= 0, name + "overlong_penalty", config.overlong_penalty, "a number of at least 0")
    expect(
        config.max_refill_rounds >= 1,
        name + "max_refill_rounds",
        config.max_refill_rounds,
        "a whole number of at least 1",
    )
    expect(
        config.old_policy is OldPolicy.trainer or config.correction in (Correction.auto, Correction.none),
        name + "correction",
        config.correction,
        "none with algorithm.old_policy=rollout, whose ratio is taken against the sampler already",
    )

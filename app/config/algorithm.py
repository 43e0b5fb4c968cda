"""Settings of `algorithm=`. The table of old policies and corrections is in docs/algorithms.md.

ratio = π / π_old. The policy term, neither the KL term nor the entropy bonus, is multiplied by a weight made of
w = π_old(trainer) / π_rollout and of `correction_low` and `correction_high`; a sequence's w is the geometric mean of
its tokens' w. With one update per step π_old is the current policy, detached, and needs no extra forward pass.
"""

from dataclasses import dataclass
from enum import Enum

from app.config.setting import is_dotted_path, setting
from app.errors import expect

OBJECTIVES = ("ppo", "cispo", "dppo", "sapo")  # each is a function of `app/algorithm/objective.py`
ADVANTAGES = ("grpo", "rloo", "maxrl")  # each is a function of `app/algorithm/advantage.py`
OWN = "or the path of a function of your own, such as my_package.my_module"


class RatioLevel(Enum):
    """Granularity of the importance ratio."""

    token = "token"
    sequence = "sequence"


class Aggregation(Enum):
    """Reduction of per-token losses to one number."""

    token_mean = "token_mean"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"


class Kl(Enum):
    """Estimator of the KL divergence to the frozen reference policy, as a term of the loss.

    There is no k1 = log π/π_ref: as a loss, its gradient is zero on average. As a penalty in a token's reward, its
    policy gradient is that of k2.
    """

    none = "none"
    k2 = "k2"
    k3 = "k3"


class OldPolicy(Enum):
    """Source of the old log-probabilities in the ratio."""

    trainer = "trainer"
    rollout = "rollout"


class Correction(Enum):
    """Importance weight against the mismatch of trainer and rollout policy."""

    auto = "auto"
    none = "none"
    tis = "tis"
    icepop = "icepop"
    kpop = "kpop"
    sequence_mask = "sequence_mask"


CORRECTION_BOUNDS = {
    Correction.tis: (0.0, 2.0),
    Correction.icepop: (0.5, 5.0),
    Correction.kpop: (0.0, 0.1),
    Correction.sequence_mask: (0.99, 1.001),
}


@dataclass
class AlgorithmConfig:
    """The policy-gradient algorithm: group sizes, advantages, loss and off-policy correction."""

    name: str = setting("grpo", "Name of the preset, shown in the console, the plan and the report.")
    group_size: int = setting(
        8, "Completions per prompt, which advantages compare: 1 needs algorithm.reward_coefficient=0.", at_least=1
    )
    prompts_per_step: int = setting(32, "Prompts, and so groups, trained on in one step.", at_least=1)
    updates_per_step: int = setting(
        1, "Optimizer updates per step; must divide algorithm.prompts_per_step.", at_least=1
    )
    advantage: str = setting(
        "grpo",
        "Advantage from the rewards of a group: r - mean over their standard deviation (grpo), r - the mean of the "
        "others (rloo), r - mean over the mean (maxrl, for rewards of at least 0); or f(rewards) of your own.",
        noun=f"one of {', '.join(ADVANTAGES)}, {OWN}.my_advantage",
    )
    normalize_by_std: bool = setting(
        True, "With algorithm.advantage=grpo, divide by the standard deviation of the rewards; Dr. GRPO does not."
    )
    reward_coefficient: float = setting(
        1.0, "Weight of the advantages from rewards; 0 learns from the teacher alone.", at_least=0
    )
    objective: str = setting(
        "ppo",
        "Term of a token that an update maximizes: PPO's clip, CISPO's bounded weight, DPPO's trust region of "
        "probabilities, SAPO's smooth gate; or f(batch, ratio) of your own, which returns one number per token.",
        noun=f"one of {', '.join(OBJECTIVES)}, {OWN}.my_objective",
    )
    ratio: RatioLevel = setting(
        RatioLevel.token, "Importance ratio per token, or per sequence and length-normalized (GSPO)."
    )
    clip_low: float = setting(
        0.2, "The ratio is clamped to at least 1 - clip_low; with dppo, a probability's fall.", at_least=0, at_most=1
    )
    clip_high: float = setting(
        0.2,
        "The ratio is clamped to at most 1 + clip_high, in DAPO 0.28; with dppo, a probability's rise.",
        at_least=0,
        infinite=True,
    )
    dual_clip: float | None = setting(
        None,
        "Bound the loss of a negative advantage A by dual_clip · |A| (arXiv 1912.09729); null does not.",
        above=1,
        infinite=True,
    )
    aggregation: Aggregation = setting(
        Aggregation.seq_mean_token_mean,
        "Reduction of token losses: seq_mean_token_mean is GRPO's, token_mean DAPO's, seq_mean_token_sum_norm "
        "Dr. GRPO's, which divides by rollout.max_completion_tokens instead of the length.",
    )
    kl: Kl = setting(
        Kl.none,
        "KL penalty to the frozen reference policy: k2 has the gradient of KL(policy, reference), k3 that of "
        "KL(reference, policy); none loads no reference.",
        noun="one of none, k2, k3 (not k1: its gradient is zero on average, that of k2 is the KL's)",
    )
    kl_coefficient: float = setting(0.0, "Weight of the KL penalty in the loss.", at_least=0)
    entropy_coefficient: float = setting(0.0, "Weight of the entropy bonus in the loss.", at_least=0)
    ce_coefficient: float = setting(1.0, "Weight of the cross-entropy on data.demonstrations in the loss.", at_least=0)
    demonstrations_per_step: int = setting(8, "Rows of data.demonstrations in each step.", at_least=1)
    old_policy: OldPolicy = setting(
        OldPolicy.trainer,
        "Log-probabilities in the ratio's denominator: the trainer's at the step's start, or the engine's.",
    )
    correction: Correction = setting(
        Correction.auto,
        "Importance weight for the mismatch of trainer and rollout policy; auto is tis where staleness can be above 0 "
        "and the old policy is the trainer's, else none.",
    )
    correction_low: float | None = setting(
        None, "Lower bound of the importance weight; null is 0.5 for icepop, 0.99 for sequence_mask.", above=0
    )
    correction_high: float | None = setting(
        None,
        "Upper bound of the importance weight, for kpop of the binary KL; null is 2 for tis, 5 for icepop, 0.1 for "
        "kpop, 1.001 for sequence_mask.",
        above=0,
        infinite=True,
    )
    overlong_buffer_fraction: float = setting(
        0.0,
        "Share of rollout.max_completion_tokens before the limit over which a length penalty grows (DAPO).",
        at_least=0,
        at_most=1,
    )
    overlong_penalty: float = setting(1.0, "Reward deducted from a completion that reaches the limit.", at_least=0)
    mask_truncated: bool = setting(False, "Give truncated completions no gradient.")
    dynamic_sampling: bool = setting(
        False, "Drop groups whose raw rewards are all equal, and sample other prompts instead (DAPO)."
    )
    max_refill_rounds: int = setting(
        10, "Rounds that replace dropped groups; the step then trains on the groups it has.", at_least=1
    )

    @property
    def own(self) -> list[str]:
        return [path for path in (self.advantage, self.objective) if path not in (*ADVANTAGES, *OBJECTIVES)]

    @property
    def smallest_group(self) -> int:
        """Trajectories that a group needs to be trained on: an advantage from rewards compares at least two."""
        return 2 if self.reward_coefficient else 1

    @property
    def prompts_per_update(self) -> int:
        return self.prompts_per_step // self.updates_per_step

    @property
    def trajectories_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    def correction_bounds(self, correction: Correction) -> tuple[float, float]:
        """Return the bounds of a correction; those that are not set are the published ones."""
        low, high = CORRECTION_BOUNDS.get(correction, CORRECTION_BOUNDS[Correction.tis])
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a step begins with an extra forward pass; with one update π_old is the current policy, detached."""
        return self.old_policy is OldPolicy.trainer and self.updates_per_step > 1

    @property
    def needs_reference(self) -> bool:
        return self.kl is not Kl.none

    def overlong_buffer_tokens(self, max_completion_tokens: int) -> int:
        """Number of tokens before the limit over which the length penalty grows."""
        return round(self.overlong_buffer_fraction * max_completion_tokens)

    def validate(self) -> None:
        for key, built_in in (("advantage", ADVANTAGES), ("objective", OBJECTIVES)):
            value = getattr(self, key)
            known = value in built_in or is_dotted_path(value)
            expect(known, f"algorithm.{key}", value, f"one of {', '.join(built_in)}, {OWN}.my_{key}")

        divides = self.prompts_per_step % self.updates_per_step == 0
        accepted = f"a divisor of algorithm.prompts_per_step={self.prompts_per_step}"
        expect(divides, "algorithm.updates_per_step", self.updates_per_step, accepted)
        accepted = "a whole number of at least 2, or algorithm.reward_coefficient=0"
        expect(self.group_size >= self.smallest_group, "algorithm.group_size", self.group_size, accepted)
        rewarded = self.reward_coefficient > 0 or not self.dynamic_sampling
        accepted = "false with algorithm.reward_coefficient=0, since it compares rewards"
        expect(rewarded, "algorithm.dynamic_sampling", self.dynamic_sampling, accepted)
        fraction = self.overlong_buffer_fraction
        accepted = "0 with algorithm.advantage=maxrl, whose rewards must not be negative"
        expect(self.advantage != "maxrl" or fraction == 0, "algorithm.overlong_buffer_fraction", fraction, accepted)

        estimated = self.needs_reference or self.kl_coefficient == 0
        accepted = "0, or an estimator with algorithm.kl=k2 or k3"
        expect(estimated, "algorithm.kl_coefficient", self.kl_coefficient, accepted)
        compares = self.old_policy is OldPolicy.rollout and self.ratio is RatioLevel.token
        accepted = "another one, or old_policy=rollout with ratio=token: DPPO compares with the engine's probabilities"
        expect(self.objective != "dppo" or compares, "algorithm.objective", self.objective, accepted)

        low, high = self.correction_bounds(self.correction)
        expect(low < high, "algorithm.correction_low", low, f"a number below algorithm.correction_high={high:g}")
        uncorrected = self.correction in (Correction.auto, Correction.none)
        accepted = "none with algorithm.old_policy=rollout, whose ratio already divides by the rollout policy"
        trainers = self.old_policy is OldPolicy.trainer
        expect(trainers or uncorrected, "algorithm.correction", self.correction, accepted)

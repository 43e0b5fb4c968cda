"""Loss of an update: a sum of components, each with a weight per token and a global denominator of its own.

    L = Σ rl / N_rl  +  Σ ref_kl / N_ref_kl  +  Σ ce / N_ce

| component | term of a token                                           | tokens            | N                       |
|-----------|-----------------------------------------------------------|-------------------|-------------------------|
| rl        | −weight · [ correction · objective(ratio, Â) + η · entropy ] | sampled        | `algorithm.aggregation` |
| ref_kl    | weight · β · KL to the reference                          | sampled           | `algorithm.aggregation` |
| ce        | −c · log π                                                | of demonstrations | their number            |

GRPO, DAPO, Dr. GRPO, GSPO, CISPO and the like are settings of rl and ref_kl; a supervised step has ce alone.

Invariants:
- A component is a raw sum, divided once by its denominator of the whole update, counted over all ranks and
  microbatches. Gradients and metrics therefore do not depend on how an update is split into microbatches.
- Gradients accumulate in one place and are divided by one number, N_rl (`common_denominator`). A component with
  another denominator is computed when N_rl is known, and multiplied by N_rl / N.
- Denominators count the unmasked batch: the term of a masked token is zero, but the token is still counted.
- Tensors over tokens have shape [N], tensors over sequences [S]. A sequence is never split across microbatches. The
  sequences of a trajectory may be: each carries the token count of the trajectory, which every denominator counts once.

Sources: DeepSeekMath (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071), dual clip
(1912.09729); those of the objectives are in objective.py. The mismatch between rollout and trainer is corrected by
truncated importance sampling (TIS), IcePop (2510.18855) and KPop (ringtech.notion.site/kpop), which mask tokens.
Components with denominators of their own are prime-rl's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from app.algorithm.objective import (
    LOG_RATIO_LIMIT,
    Terms,
    TokenBatch,
    bounded_exp,
    importance_ratio,
    objective_terms,
    sequence_mean,
)
from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl, OldPolicy

# The other tokens of a vocabulary have at least this probability in a binary KL.
MIN_OTHERS = 1e-6


class Component(Enum):
    """A summand of the loss."""

    rl = "rl"
    ref_kl = "ref_kl"
    ce = "ce"


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Raw sums over a microbatch. Sums of a dummy pass are not merged: no denominator counts its tokens."""

    components: Mapping[Component, Tensor]  # [] each; carry the gradient
    sums: dict[str, Tensor]  # [] each, detached; names and divisors as in `metrics.TABLE`

    @property
    def loss(self) -> Tensor:
        """The components' sum [], to be divided by `common_denominator`."""
        return torch.stack(list(self.components.values())).sum()

    def stack(self) -> Tensor:
        """Return the sums as one tensor [sums], still on the device."""
        return torch.stack(list(self.sums.values()))


def denominators(
    config: AlgorithmConfig, *, tokens: float, sequences: float, demonstrated: float = 0, max_completion_tokens: int
) -> dict[Component, float]:
    """Return the divisor of each component in an update, from counts of its unmasked batch over all ranks.

    `demonstrated` counts the tokens of demonstrations.
    """
    match config.aggregation:
        case Aggregation.token_mean:
            sampled = tokens
        case Aggregation.seq_mean_token_mean | Aggregation.seq_mean_token_sum:
            sampled = sequences
        case Aggregation.seq_mean_token_sum_norm:
            sampled = sequences * max_completion_tokens
    return {Component.rl: sampled, Component.ref_kl: sampled, Component.ce: demonstrated}


def common_denominator(divisors: Mapping[Component, float]) -> float:
    """Return what the accumulated gradient is divided by: N_rl, or N_ce in an update without sampled tokens."""
    return max(divisors[Component.rl] or divisors[Component.ce], 1.0)


def demonstration_loss(logprobs: Tensor, weight: Tensor, coefficient: float) -> LossSums:
    """Compute the component ce of a microbatch of demonstrations.

    Args:
        logprobs: [N] of their tokens at temperature 1; carry the gradient.
        weight: [N], 0 for the token of a dummy.
        coefficient: c · N / N_ce, with the common denominator N.
    """
    cross_entropy = -(weight * logprobs).sum()
    loss = coefficient * cross_entropy
    return LossSums({Component.ce: loss}, {"loss/total": loss.detach(), "loss/ce": cross_entropy.detach()})


def policy_loss(batch: TokenBatch, config: AlgorithmConfig, correction: Correction) -> LossSums:
    """Compute the components rl and ref_kl and the metrics of a microbatch as raw sums.

    Args:
        correction: The resolved correction, never `auto`.

    Raises:
        ValueError: If `correction` is `auto`, or a reference was given with `algorithm.kl=none`.
    """
    trainer_old = batch.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    old = batch.rollout_logprobs if config.old_policy is OldPolicy.rollout else trainer_old

    ratio = importance_ratio(batch, old, config.ratio)
    objective = objective_terms(batch, ratio, config)
    corrected = correction_weight(batch, trainer_old, config, correction)
    weight = aggregation_weight(batch, config.aggregation)

    terms = {"loss/policy": -(weight * corrected * objective.values).sum()}
    components = {Component.rl: terms["loss/policy"]}
    if config.entropy_coefficient > 0:
        terms["loss/entropy"] = -config.entropy_coefficient * (weight * batch.entropy).sum()
        components[Component.rl] = terms["loss/policy"] + terms["loss/entropy"]
    if batch.reference_logprobs is not None:
        kl = kl_estimate(batch.logprobs - batch.reference_logprobs, config.kl)
        terms["loss/kl"] = components[Component.ref_kl] = config.kl_coefficient * (weight * kl).sum()

    with torch.no_grad():
        total = torch.stack(list(components.values())).sum()
        sums = {name: term.detach() for name, term in {"loss/total": total, **terms}.items()}
        sums |= _policy_sums(batch, old, ratio, objective, config)
        if batch.first_update or batch.old_logprobs is not None:  # else the trainer's π_old is not known
            sums |= _mismatch_sums(batch, trainer_old, corrected)
    return LossSums(components, sums)


def aggregation_weight(batch: TokenBatch, aggregation: Aggregation) -> Tensor:
    """Weight of each token [N] in the raw sum: 0 if masked, 1/tokens for a mean over the trajectory, else 1."""
    weight = batch.weight_mask
    if aggregation is Aggregation.seq_mean_token_mean:
        weight = weight / batch.trajectory_tokens.clamp(min=1)
    return weight[batch.sequence].to(batch.logprobs.dtype)


def correction_weight(
    batch: TokenBatch, trainer_old: Tensor, config: AlgorithmConfig, correction: Correction
) -> Tensor:
    """Weight [N] from w = π_old(trainer) / π_rollout, without gradient; table in `app/config/algorithm.py`."""
    log_weight = trainer_old - batch.rollout_logprobs
    weight = bounded_exp(log_weight)
    low, high = config.correction_bounds(correction)

    match correction:
        case Correction.none:
            return torch.ones_like(weight)
        case Correction.tis:
            return weight.clamp(max=high)
        case Correction.icepop:
            return torch.where((weight >= low) & (weight <= high), weight, 0.0)
        case Correction.kpop:
            return torch.where(binary_kl(trainer_old, batch.rollout_logprobs) <= high, weight, 0.0)
        case Correction.sequence_mask:
            mean = bounded_exp(sequence_mean(log_weight, batch))
            in_band = (mean >= low) & (mean <= high)
            return in_band[batch.sequence].to(weight.dtype)
        case Correction.auto:
            raise ValueError("correction=auto must be resolved first; use RunConfig.correction")


def binary_kl(one: Tensor, other: Tensor) -> Tensor:
    """Return the larger of the two KL divergences [N] between "this token or another one" under two policies.

    `one` and `other` are the tokens' log-probabilities [N] under them.
    """
    one, other = one.clamp(max=-MIN_OTHERS), other.clamp(max=-MIN_OTHERS)
    difference, others = one - other, log_others(one) - log_others(other)
    forward = one.exp() * difference - one.expm1() * others
    backward = other.expm1() * others - other.exp() * difference
    return torch.maximum(forward, backward)


def log_others(logprobs: Tensor) -> Tensor:
    """Return log(1 - p) of tokens with the log-probabilities log p below 0."""
    return torch.log(-torch.expm1(logprobs))


def kl_estimate(log_ratio: Tensor, kind: Kl) -> Tensor:
    """KL penalty at each sampled token, from log π/π_ref.

    On tokens sampled from π, the expected gradient of k2 is that of KL(π ‖ π_ref). k3 (eq. 4 of DeepSeekMath) has the
    expected value KL(π ‖ π_ref), but the gradient of KL(π_ref ‖ π). Both are per token: a token is not penalized for
    the divergence at later ones.
    """
    match kind:
        case Kl.k2:
            return log_ratio.square() / 2
        case Kl.k3:
            return k3(-log_ratio)
        case Kl.none:
            raise ValueError("reference log-probabilities require algorithm.kl=k2 or k3; it is none")


def k3(log_ratio: Tensor) -> Tensor:
    """Return q/p − log(q/p) − 1 from log q/p. Never negative; unbiased for KL(p ‖ q) on tokens sampled from p."""
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    # exp(x) - 1 would cancel to rounding errors of 1e-7 where the policies agree.
    return (bounded.expm1() - bounded).clamp(min=0)


def _policy_sums(
    batch: TokenBatch, old: Tensor, ratio: Tensor, objective: Terms, config: AlgorithmConfig
) -> dict[str, Tensor]:
    """Policy movement from π_old and clip fractions."""
    advantage = batch.token_advantages
    log_ratio = batch.logprobs - old
    # Of each sequence [S] in the sampled tokens of its trajectory; 1 for a trajectory of one sequence.
    share = torch.where(batch.trajectory_tokens > 0, batch.lengths / batch.trajectory_tokens.clamp(min=1), 1.0)
    sums = {
        "entropy": batch.entropy.sum(),
        "ratio/mean": ratio.sum(),
        "ratio/sequence_mean": (share * bounded_exp(sequence_mean(log_ratio, batch))).sum(),
        "ratio/max": _maximum(ratio),
        "ratio/min": -_maximum(-ratio),
        "clip/low_fraction": objective.low.sum(),
        "clip/high_fraction": objective.high.sum(),
        "kl/old": k3(log_ratio).sum(),
    }

    if config.dual_clip is not None and config.objective == "ppo":
        sums["clip/dual_fraction"] = ((advantage < 0) & (ratio > config.dual_clip)).sum()
    if batch.reference_logprobs is not None:
        sums["kl/reference"] = k3(batch.reference_logprobs - batch.logprobs).sum()

    if batch.teacher_logprobs is not None:
        difference = batch.logprobs - batch.teacher_logprobs
        sums["teacher/kl"] = difference.sum()
        sums["teacher/clipped_fraction"] = (difference.abs() > batch.teacher.clip).sum()

    return {name: value.detach().to(batch.logprobs.dtype) for name, value in sums.items()}


def _mismatch_sums(batch: TokenBatch, trainer_old: Tensor, corrected: Tensor) -> dict[str, Tensor]:
    """Mismatch between the trainer's π_old and the rollout policy."""
    log_weight = trainer_old - batch.rollout_logprobs
    weight = bounded_exp(log_weight)
    kl = k3(log_weight)
    same = torch.zeros_like(kl) if batch.same_version is None else batch.same_version.to(kl.dtype)
    return {
        "mismatch/kl": kl.sum(),
        "mismatch/kl_same_version": (same * kl).sum(),
        "mismatch/same_version_tokens": same.sum(),
        "mismatch/abs_difference": log_weight.abs().sum(),
        "mismatch/max_ratio": _maximum(weight),
        "mismatch/tokens": torch.ones_like(weight).sum(),
        "mismatch/weight": weight.sum(),
        "mismatch/weight_square": weight.square().sum(),
        "mismatch/masked_fraction": (corrected == 0).sum().to(weight.dtype),
    }


def _maximum(values: Tensor) -> Tensor:
    """Return the largest value, or −inf for an empty tensor, so that any other microbatch wins the merge."""
    return torch.cat([values, values.new_full((1,), -torch.inf)]).amax()

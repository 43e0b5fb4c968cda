"""The policy loss of a packed microbatch: one mechanism, of which GRPO, DAPO, Dr. GRPO and GSPO are settings.

    J = Σ weight · [ correction · min(ratio · Â, clip(ratio, 1 − ε_low, 1 + ε_high) · Â) − β · KL + η · entropy ]

What always holds: the result is a raw sum, to be divided once by the whole update's `denominator`, so that gradients
and metrics do not depend on how an update was cut into microbatches. Denominators count the unmasked batch: a masked
token's term is zero, but it is still counted. Tensors of tokens have shape [N], of sequences [S]; a sequence is never
split. Sources: DeepSeekMath (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071), dual clip
(1912.09729), truncated importance sampling and IcePop (masked band) for the mismatch of sampler and trainer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl, OldPolicy, RatioLevel

LOG_RATIO_LIMIT = 20.0  # log-ratios are clamped to ± this before exp


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """The N completion tokens of S whole sequences; prompts are not in here."""

    logprobs: Tensor  # [N] of the current policy, at the sampling temperature; carries the gradient
    old_logprobs: Tensor | None  # [N] of the trainer when the step began; None: the current ones, detached (ratio 1)
    rollout_logprobs: Tensor  # [N] as the engine reported them
    reference_logprobs: Tensor | None  # [N] of the frozen reference; None without `algorithm.kl`
    entropy: Tensor  # [N] nats; carries a gradient where `entropy_coefficient` is above 0
    sequence: Tensor  # [N] int64: which of the S sequences a token belongs to
    advantages: Tensor  # [S]
    lengths: Tensor  # [S] completion tokens of each sequence; 0 is allowed
    weight_mask: Tensor  # [S] 0 for sequences without gradient (truncated and masked, dummy passes), else 1


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Raw sums over a microbatch. Those of a dummy pass are not merged: its tokens are in no denominator."""

    loss: Tensor  # [] carries the gradient; divide by `denominator`
    sums: dict[str, Tensor]  # [] detached, named and divided as in `metrics.TABLE`

    def floats(self) -> dict[str, float]:
        """The sums on the host, in one transfer: what `metrics.merge` takes."""
        return dict(zip(self.sums, torch.stack(list(self.sums.values())).tolist(), strict=True))


def denominator(config: AlgorithmConfig, *, tokens: float, sequences: float, max_completion_tokens: int) -> float:
    """What the update's summed loss is divided by, from global counts of its unmasked batch."""
    match config.aggregation:
        case Aggregation.token_mean:
            return tokens
        case Aggregation.seq_mean_token_mean | Aggregation.seq_mean_token_sum:
            return sequences
        case Aggregation.seq_mean_token_sum_norm:
            return sequences * max_completion_tokens


def policy_loss(batch: TokenBatch, config: AlgorithmConfig, correction: Correction) -> LossSums:
    """The loss of a microbatch and its metrics, as raw sums. `correction` is the resolved one, never `auto`."""
    trainer_old = batch.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    old = batch.rollout_logprobs if config.old_policy is OldPolicy.rollout else trainer_old
    ratio = importance_ratio(batch, old, config.ratio)
    objective = clipped_objective(ratio, batch.advantages[batch.sequence], config)
    corrected = correction_weight(batch, trainer_old, config, correction)
    weight = aggregation_weight(batch, config.aggregation)

    terms = {"loss/policy": -(weight * corrected * objective).sum()}
    if batch.reference_logprobs is not None:
        kl = kl_estimate(batch.logprobs - batch.reference_logprobs, config.kl)
        terms["loss/kl"] = config.kl_coefficient * (weight * kl).sum()
    if config.entropy_coefficient > 0:
        terms["loss/entropy"] = -config.entropy_coefficient * (weight * batch.entropy).sum()
    loss = torch.stack(list(terms.values())).sum()

    with torch.no_grad():
        sums = {"loss/total": loss.detach(), **{name: term.detach() for name, term in terms.items()}}
        sums |= _policy_sums(batch, old, ratio, config) | _mismatch_sums(batch, trainer_old, corrected)
    return LossSums(loss, sums)


def importance_ratio(batch: TokenBatch, old: Tensor, level: RatioLevel) -> Tensor:
    """π / π_old of each token [N]; at sequence level every token carries its sequence's.

    GSPO (eq. 7): s_i = exp(mean over the sequence of log π/π_old). Following GSPO-token (eq. 14), token t carries
    sg[s_i] · π_t / sg[π_t]: the same value, and the same gradient where the tokens' weights are equal; where they
    differ (a correction by token), each token's gradient keeps its own.
    """
    log_ratio = batch.logprobs - old
    if level is RatioLevel.sequence:
        mean = sequence_mean(log_ratio.detach(), batch)[batch.sequence]
        log_ratio = mean + batch.logprobs - batch.logprobs.detach()
    return bounded_exp(log_ratio)


def clipped_objective(ratio: Tensor, advantage: Tensor, config: AlgorithmConfig) -> Tensor:
    """PPO's clipped objective with DAPO's two ranges (eq. 8); dual clip bounds it below by c · Â where Â < 0."""
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    if config.dual_clip is None:
        return objective
    return torch.where(advantage < 0, torch.maximum(objective, config.dual_clip * advantage), objective)


def aggregation_weight(batch: TokenBatch, aggregation: Aggregation) -> Tensor:
    """The weight of each token [N] in the raw sum: 1/length for a mean inside the sequence, else 1; 0 where masked."""
    weight = batch.weight_mask
    if aggregation is Aggregation.seq_mean_token_mean:
        weight = weight / batch.lengths.clamp(min=1)
    return weight[batch.sequence].to(batch.logprobs.dtype)


def correction_weight(
    batch: TokenBatch, trainer_old: Tensor, config: AlgorithmConfig, correction: Correction
) -> Tensor:
    """The weight [N] made of w = π_old(trainer) / π_sampler, without gradient; see the table in `schema`."""
    log_weight = trainer_old - batch.rollout_logprobs
    weight = bounded_exp(log_weight)
    match correction:
        case Correction.none:
            return torch.ones_like(weight)
        case Correction.tis:
            return weight.clamp(max=config.tis_max)
        case Correction.icepop:
            return torch.where((weight >= config.icepop_low) & (weight <= config.icepop_high), weight, 0.0)
        case Correction.sequence_mask:
            mean = bounded_exp(sequence_mean(log_weight, batch))
            kept = (mean >= config.sequence_mask_low) & (mean <= config.sequence_mask_high)
            return kept[batch.sequence].to(weight.dtype)
        case Correction.auto:
            raise ValueError("correction=auto must be resolved first: use RunConfig.correction")


def kl_estimate(log_ratio: Tensor, kind: Kl) -> Tensor:
    """Estimate of KL(π ‖ π_ref) at each sampled token from log π/π_ref; k3 is DeepSeekMath's eq. 4."""
    match kind:
        case Kl.k1:
            return log_ratio
        case Kl.k2:
            return log_ratio.square() / 2
        case Kl.k3:
            return k3(-log_ratio)
        case Kl.none:
            raise ValueError("reference log-probabilities were given, but algorithm.kl=none")


def k3(log_ratio: Tensor) -> Tensor:
    """q/p − log(q/p) − 1 from log q/p, for tokens sampled from p: never negative, unbiased for KL(p ‖ q)."""
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return bounded.exp() - bounded - 1


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_mean(values: Tensor, batch: TokenBatch) -> Tensor:
    """Mean of token values [N] over each sequence [S]; 0 for an empty one."""
    totals = values.new_zeros(batch.lengths.shape).index_add(0, batch.sequence, values)
    return totals / batch.lengths.clamp(min=1)


def _policy_sums(batch: TokenBatch, old: Tensor, ratio: Tensor, config: AlgorithmConfig) -> dict[str, Tensor]:
    """How far the policy moved from π_old, and what clipping did about it."""
    advantage, log_ratio = batch.advantages[batch.sequence], batch.logprobs - old
    sums = {
        "entropy": batch.entropy.sum(),
        "ratio/mean": ratio.sum(),
        "ratio/sequence_mean": bounded_exp(sequence_mean(log_ratio, batch)).sum(),
        "ratio/max": _maximum(ratio),
        "ratio/min": -_maximum(-ratio),
        "clip/low_fraction": ((advantage < 0) & (ratio < 1 - config.clip_low)).sum(),
        "clip/high_fraction": ((advantage > 0) & (ratio > 1 + config.clip_high)).sum(),
        "kl/old": k3(log_ratio).sum(),
    }
    if config.dual_clip is not None:
        sums["clip/dual_fraction"] = ((advantage < 0) & (ratio > config.dual_clip)).sum()
    if batch.reference_logprobs is not None:
        sums["kl/reference"] = k3(batch.reference_logprobs - batch.logprobs).sum()
    return {name: value.detach().to(batch.logprobs.dtype) for name, value in sums.items()}


def _mismatch_sums(batch: TokenBatch, trainer_old: Tensor, corrected: Tensor) -> dict[str, Tensor]:
    """How far the trainer's π_old is from what the sampler says it sampled from; measured under every setting."""
    log_weight = trainer_old - batch.rollout_logprobs
    weight = bounded_exp(log_weight)
    return {
        "mismatch/kl": k3(log_weight).sum(),
        "mismatch/abs_difference": log_weight.abs().sum(),
        "mismatch/max_ratio": _maximum(weight),
        "mismatch/weight": weight.sum(),
        "mismatch/weight_square": weight.square().sum(),
        "mismatch/masked_fraction": (corrected == 0).sum().to(weight.dtype),
    }


def _maximum(values: Tensor) -> Tensor:
    """The largest value; −inf of none, which any other microbatch's wins over."""
    return torch.cat([values, values.new_full((1,), -torch.inf)]).amax()

"""`algorithm.objective` and `ratio`: the term of each token that an update maximizes, before weights and averages.

| objective | term of a token, r = π / π_old                                         | source                     |
|-----------|------------------------------------------------------------------------|----------------------------|
| ppo       | min(r · Â, clip(r, 1 − ε_low, 1 + ε_high) · Â)                         | DAPO, 2503.14476, eq. 8    |
| cispo     | sg(clip(r, 1 − ε_low, 1 + ε_high)) · Â · log π                         | MiniMax-M1, 2506.13585     |
| dppo      | r · Â; 0 where π has left π_rollout by more than ε in the direction of Â | DPPO, 2602.04879, eq. 13 |
| sapo      | 4/τ · σ(τ · (r − 1)) · Â, with one τ for each sign of Â                | SAPO, 2511.20347           |

sg stops the gradient. At r = 1 all four have the gradient of REINFORCE, Â · ∇log π.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.algorithm.advantage import teacher_penalty
from app.config.algorithm import AlgorithmConfig, RatioLevel
from app.config.teacher import TeacherConfig
from app.utils.user_code import resolve

# Log-ratios are clamped to ± this limit before exp.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """N sampled tokens of S whole sequences, without prompts and observations."""

    logprobs: Tensor  # [N] current policy at the sampling temperature; carries the gradient
    old_logprobs: Tensor | None  # [N] trainer at the start of the step; None: current ones, detached (ratio 1)
    rollout_logprobs: Tensor  # [N] as reported by the engine
    reference_logprobs: Tensor | None  # [N] frozen reference; None without `algorithm.kl`
    entropy: Tensor  # [N] nats; carries a gradient if `entropy_coefficient` is above 0
    sequence: Tensor  # [N] int64, index in 0..S of the token's sequence
    advantages: Tensor  # [S]
    lengths: Tensor  # [S] sampled tokens per sequence; 0 is allowed
    trajectory_tokens: Tensor  # [S] sampled tokens of the sequence's trajectory; of a single sequence, its length
    weight_mask: Tensor  # [S] 0 for sequences without gradient (masked truncations, dummy passes), else 1
    teacher_logprobs: Tensor | None = None  # [N] of a frozen teacher
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    same_version: Tensor | None = None  # [N] bool, sampled by the policy of the start of the step; None: not known
    first_update: bool = True  # whether the current policy is that of the start of the step

    @property
    def token_advantages(self) -> Tensor:
        """Advantages [N]: those of the sequences, minus the teacher's penalty of the token."""
        advantages = self.advantages[self.sequence]
        if self.teacher_logprobs is None:
            return advantages
        return advantages - teacher_penalty(self.logprobs, self.teacher_logprobs, self.teacher)


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The objective of N tokens, and which of them a bound has cut off."""

    values: Tensor  # [N]; carries the gradient
    low: Tensor  # [N] bool: bounded from below
    high: Tensor  # [N] bool: bounded from above


def ppo(batch: TokenBatch, ratio: Tensor, config: AlgorithmConfig) -> Terms:
    """PPO's clipped objective with DAPO's two ranges. Dual clip bounds it from below by c · Â where Â < 0."""
    advantage = batch.token_advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    values = torch.minimum(ratio * advantage, clipped * advantage)
    if config.dual_clip is not None:
        values = torch.where(advantage < 0, torch.maximum(values, config.dual_clip * advantage), values)

    low = (advantage < 0) & (ratio < 1 - config.clip_low)
    high = (advantage > 0) & (ratio > 1 + config.clip_high)
    return Terms(values, low, high)


def cispo(batch: TokenBatch, ratio: Tensor, config: AlgorithmConfig) -> Terms:
    """Every token keeps a gradient; the bounded ratio is its weight. `clip_low=1` leaves out the lower bound."""
    advantage = batch.token_advantages
    lowest, highest = 1 - config.clip_low, 1 + config.clip_high
    weight = ratio.detach().clamp(lowest, highest)
    return Terms(weight * advantage * batch.logprobs, ratio < lowest, ratio > highest)


def dppo(batch: TokenBatch, ratio: Tensor, config: AlgorithmConfig) -> Terms:
    """The trust region bounds the token's total variation |π − π_rollout|, so rare tokens may move by large ratios."""
    advantage = batch.token_advantages
    moved = batch.logprobs.detach().exp() - batch.rollout_logprobs.exp()
    low = (advantage < 0) & (moved < -config.clip_low)
    high = (advantage > 0) & (moved > config.clip_high)
    return Terms(torch.where(low | high, 0.0, ratio * advantage), low, high)


SAPO_TAU = (1.0, 1.05)  # of positive and negative advantages, as in the paper (arXiv 2511.20347)


def sapo(batch: TokenBatch, ratio: Tensor, config: AlgorithmConfig) -> Terms:
    """A smooth gate in place of a clip: the gradient fades with the distance from r = 1."""
    advantage = batch.token_advantages
    positive, negative = ratio.new_tensor(SAPO_TAU)
    tau = torch.where(advantage > 0, positive, negative)
    values = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return Terms(values, nowhere, nowhere)


def objective_terms(batch: TokenBatch, ratio: Tensor, config: AlgorithmConfig) -> Terms:
    """Return the terms of `algorithm.objective`, which may be a function of the user's: f(batch, ratio) → [N]."""
    built_in = {"ppo": ppo, "cispo": cispo, "dppo": dppo, "sapo": sapo}
    if config.objective in built_in:
        return built_in[config.objective](batch, ratio, config)

    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return Terms(resolve(config.objective)(batch, ratio), nowhere, nowhere)


def importance_ratio(batch: TokenBatch, old: Tensor, level: RatioLevel) -> Tensor:
    """Return π / π_old of each token [N]; at sequence level, the ratio of its sequence.

    GSPO (eq. 7): s_i = exp(mean over the sequence of log π/π_old). As in GSPO-token (eq. 14), token t carries
    sg[s_i] · π_t / sg[π_t], which has the same value. The gradient is also the same if all tokens of the sequence have
    equal weights. If weights differ (token-level correction), the gradient of each token keeps its own weight.
    """
    log_ratio = batch.logprobs - old
    if level is RatioLevel.sequence:
        mean = sequence_mean(log_ratio.detach(), batch)[batch.sequence]
        log_ratio = mean + batch.logprobs - batch.logprobs.detach()
    return bounded_exp(log_ratio)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio clamped to ± `LOG_RATIO_LIMIT`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_mean(values: Tensor, batch: TokenBatch) -> Tensor:
    """Mean of token values [N] over each sequence [S]; 0 for an empty sequence."""
    totals = values.new_zeros(batch.lengths.shape).index_add(0, batch.sequence, values)
    return totals / batch.lengths.clamp(min=1)

"""Formulas of the papers as plain Python loops in double precision: the reference of the loss tests.

Written from the papers, without torch, and without `app` except for the names of its settings. A case is a list of
sequences; a sequence has one list per quantity, with one number per token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, Kl, OldPolicy, RatioLevel


@dataclass(frozen=True)
class Tokens:
    """Per-token values of one sequence, and its advantage."""

    logprobs: list[float]
    trainer_old: list[float]
    rollout: list[float]
    reference: list[float]
    entropy: list[float]
    advantage: float
    unmasked: bool

    def __len__(self) -> int:
        return len(self.logprobs)

    def old(self, config: AlgorithmConfig) -> list[float]:
        return self.rollout if config.old_policy is OldPolicy.rollout else self.trainer_old


Case = Sequence[Tokens]


def bounded_exp(value: float) -> float:
    return math.exp(max(-20.0, min(20.0, value)))


def k3_of(log_ratio: float) -> float:
    value = max(-20.0, min(20.0, log_ratio))
    return math.expm1(value) - value


def sequence_ratio(sequence: Tokens, old: list[float]) -> float:
    """GSPO eq. 7."""
    if not len(sequence):
        return 1.0
    return bounded_exp(
        math.fsum(new - old_logprob for new, old_logprob in zip(sequence.logprobs, old, strict=True)) / len(sequence)
    )


def ratios(sequence: Tokens, config: AlgorithmConfig) -> list[float]:
    old = sequence.old(config)
    if config.ratio is RatioLevel.sequence:
        return [sequence_ratio(sequence, old)] * len(sequence)
    return [bounded_exp(new - was) for new, was in zip(sequence.logprobs, old, strict=True)]


def mismatches(sequence: Tokens) -> list[float]:
    return [bounded_exp(was - sampled) for was, sampled in zip(sequence.trainer_old, sequence.rollout, strict=True)]


def corrections(sequence: Tokens, config: AlgorithmConfig, correction: Correction) -> list[float]:
    weights = mismatches(sequence)
    published = {Correction.icepop: (0.5, 5.0), Correction.kpop: (0.0, 0.1), Correction.sequence_mask: (0.99, 1.001)}
    low, high = published.get(correction, (0.0, 2.0))
    low, high = config.correction_low or low, config.correction_high or high
    if correction is Correction.tis:
        return [min(weight, high) for weight in weights]
    if correction is Correction.icepop:
        return [weight if low <= weight <= high else 0.0 for weight in weights]
    if correction is Correction.kpop:
        pairs = zip(sequence.trainer_old, sequence.rollout, strict=True)
        kept = [max(binary_kl(p, q), binary_kl(q, p)) <= high for p, q in pairs]
        return [weight if keep else 0.0 for weight, keep in zip(weights, kept, strict=True)]
    if correction is Correction.sequence_mask and len(sequence):
        logs = [trainer - rollout for trainer, rollout in zip(sequence.trainer_old, sequence.rollout, strict=True)]
        mean = math.exp(math.fsum(logs) / len(logs))
        return [1.0 if low <= mean <= high else 0.0] * len(sequence)
    return [1.0] * len(sequence)


def binary_kl(one: float, other: float) -> float:
    """KL between "this token" and "another one" under two policies, from log-probabilities of the token."""
    p, q = (min(math.exp(logprob), 1 - 1e-6) for logprob in (one, other))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def surrogate(ratio: float, advantage: float, config: AlgorithmConfig) -> float:
    """DAPO eq. 8's min of the ratio and the clipped ratio, bounded by dual clip where the advantage is negative."""
    clipped = max(1 - config.clip_low, min(1 + config.clip_high, ratio))
    value = min(ratio * advantage, clipped * advantage)
    if config.dual_clip is not None and advantage < 0:
        value = max(value, config.dual_clip * advantage)
    return value


def penalty(new: float, reference: float, kind: Kl) -> float:
    if kind is Kl.k2:
        return (new - reference) ** 2 / 2
    if kind is Kl.k3:  # DeepSeekMath eq. 4
        return math.exp(reference - new) - (reference - new) - 1
    return 0.0


def token_losses(sequence: Tokens, config: AlgorithmConfig, correction: Correction) -> list[float]:
    weights, ratio = corrections(sequence, config, correction), ratios(sequence, config)
    losses = []
    for t in range(len(sequence)):
        policy = weights[t] * surrogate(ratio[t], sequence.advantage, config)
        kl = config.kl_coefficient * penalty(sequence.logprobs[t], sequence.reference[t], config.kl)
        losses.append(-policy + kl - config.entropy_coefficient * sequence.entropy[t])
    return losses


def loss(case: Case, config: AlgorithmConfig, correction: Correction, max_completion_tokens: int) -> float:
    """The loss of an update, fully divided. Masked sequences are zero but counted."""
    sums = [math.fsum(token_losses(s, config, correction)) if s.unmasked else 0.0 for s in case]
    lengths = [len(s) for s in case]
    if config.aggregation is Aggregation.token_mean:  # DAPO: 1 / Σ|o_i| · Σ_i Σ_t
        return math.fsum(sums) / sum(lengths)
    if config.aggregation is Aggregation.seq_mean_token_mean:  # GRPO: 1/G · Σ_i 1/|o_i| · Σ_t
        return math.fsum(total / length for total, length in zip(sums, lengths, strict=True) if length) / len(case)
    if config.aggregation is Aggregation.seq_mean_token_sum:
        return math.fsum(sums) / len(case)
    return math.fsum(total / max_completion_tokens for total in sums) / len(case)  # Dr. GRPO


def gradient(case: Case, config: AlgorithmConfig, correction: Correction, max_completion_tokens: int) -> list[float]:
    """∂loss/∂log π of every token, by central differences. π_old and the correction stay fixed."""
    step = 1e-6
    slopes = []
    for index, sequence in enumerate(case):
        for t in range(len(sequence)):
            ends = []
            for sign in (1, -1):
                moved = list(sequence.logprobs)
                moved[t] += sign * step
                changed = [*case[:index], replace(sequence, logprobs=moved), *case[index + 1 :]]
                ends.append(loss(changed, config, correction, max_completion_tokens))
            slopes.append((ends[0] - ends[1]) / (2 * step))
    return slopes


def metrics(case: Case, config: AlgorithmConfig, correction: Correction) -> dict[str, float]:
    """Expected metrics of the case, except for its losses."""
    rows = []
    for sequence in case:
        ratio, weight = ratios(sequence, config), mismatches(sequence)
        corrected, old = corrections(sequence, config, correction), sequence.old(config)
        rows += [
            {
                "advantage": sequence.advantage,
                "ratio": ratio[t],
                "weight": weight[t],
                "corrected": corrected[t],
                "entropy": sequence.entropy[t],
                "old": sequence.logprobs[t] - old[t],
                "reference": sequence.reference[t] - sequence.logprobs[t],
                "mismatch": sequence.trainer_old[t] - sequence.rollout[t],
            }
            for t in range(len(sequence))
        ]
    n = len(rows)
    low = [row["advantage"] < 0 and row["ratio"] < 1 - config.clip_low for row in rows]
    high = [row["advantage"] > 0 and row["ratio"] > 1 + config.clip_high for row in rows]
    expected = {
        "entropy": math.fsum(row["entropy"] for row in rows) / n,
        "ratio/mean": math.fsum(row["ratio"] for row in rows) / n,
        "ratio/sequence_mean": math.fsum(sequence_ratio(s, s.old(config)) for s in case) / len(case),
        "ratio/max": max(row["ratio"] for row in rows),
        "ratio/min": min(row["ratio"] for row in rows),
        "clip/low_fraction": sum(low) / n,
        "clip/high_fraction": sum(high) / n,
        "kl/old": math.fsum(k3_of(row["old"]) for row in rows) / n,
        "mismatch/kl": math.fsum(k3_of(row["mismatch"]) for row in rows) / n,
        "mismatch/abs_difference": math.fsum(abs(row["mismatch"]) for row in rows) / n,
        "mismatch/max_ratio": max(row["weight"] for row in rows),
        "mismatch/effective_sample_size": math.fsum(row["weight"] for row in rows) ** 2
        / (n * math.fsum(row["weight"] ** 2 for row in rows)),
        "mismatch/masked_fraction": sum(row["corrected"] == 0 for row in rows) / n,
    }
    if config.kl is not Kl.none:
        expected["kl/reference"] = math.fsum(k3_of(row["reference"]) for row in rows) / n
    if config.dual_clip is not None:
        expected["clip/dual_fraction"] = (
            sum(row["advantage"] < 0 and row["ratio"] > config.dual_clip for row in rows) / n
        )
    return expected

"""Random microbatches, as tensors of the application and as cases of the reference loss."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.algorithm import metrics
from app.algorithm.loss import common_denominator, denominators, policy_loss
from app.algorithm.objective import TokenBatch
from app.config.algorithm import AlgorithmConfig, Correction, Kl

from .reference_loss import Case, Tokens

LIMIT = 9  # max_completion_tokens
LENGTHS = (4, 0, 1, 9, 2, 0, 6)


def random_case(
    seed: int, lengths: Sequence[int] = LENGTHS, *, spread: float = 0.6, masked: float = 0.3, on_policy: bool = False
) -> Case:
    """Sequences of these lengths whose policies differ by about `spread` nats. A fraction `masked` is masked."""
    rng = random.Random(seed)

    def near(values: list[float], by: float) -> list[float]:
        return [value + rng.gauss(0, by) for value in values]

    case = []
    for length in lengths:
        logprobs = [-rng.expovariate(1) for _ in range(length)]
        old = list(logprobs) if on_policy else near(logprobs, spread)
        case.append(
            Tokens(
                logprobs=logprobs,
                trainer_old=old,
                rollout=near(old, spread),
                reference=near(logprobs, spread),
                entropy=[rng.random() for _ in range(length)],
                advantage=rng.gauss(0, 1),
                unmasked=rng.random() >= masked,
            )
        )
    return case


def batch_of(case: Case, config: AlgorithmConfig, *, recompute_old: bool = True) -> TokenBatch:
    """Convert the case to tensors in double precision. `recompute_old=False`: π_old is the current policy."""

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([value for sequence in case for value in getattr(sequence, name)], dtype=torch.float64)

    lengths = torch.tensor([len(sequence) for sequence in case], dtype=torch.int64)
    return TokenBatch(
        logprobs=flat("logprobs").requires_grad_(),
        old_logprobs=flat("trainer_old") if recompute_old else None,
        rollout_logprobs=flat("rollout"),
        reference_logprobs=None if config.kl is Kl.none else flat("reference"),
        entropy=flat("entropy"),
        sequence=torch.repeat_interleave(torch.arange(len(case)), lengths),
        advantages=torch.tensor([sequence.advantage for sequence in case], dtype=torch.float64),
        lengths=lengths,
        trajectory_tokens=lengths,
        weight_mask=torch.tensor([float(sequence.unmasked) for sequence in case], dtype=torch.float64),
    )


@dataclass(frozen=True)
class Update:
    """Result of an update."""

    loss: float
    gradient: list[float]  # per token
    metrics: dict[str, float]


def update(
    microbatches: Sequence[Case], config: AlgorithmConfig, correction: Correction, *, recompute_old: bool = True
) -> Update:
    """Follow the trainer: raw sums per microbatch, merged, divided once by global counts."""
    total = 0.0
    sums: dict[str, float] = {}
    gradient: list[float] = []
    for case in microbatches:
        batch = batch_of(case, config, recompute_old=recompute_old)
        result = policy_loss(batch, config, correction)
        result.loss.backward()
        assert batch.logprobs.grad is not None
        total += result.loss.item()
        gradient += batch.logprobs.grad.tolist()
        sums = metrics.merge(sums, dict(zip(result.sums, result.stack().tolist(), strict=True)))

    sequences = [sequence for case in microbatches for sequence in case]
    tokens = sum(map(len, sequences))
    counts = denominators(config, tokens=tokens, sequences=len(sequences), max_completion_tokens=LIMIT)
    divisor = common_denominator(counts)
    return Update(
        loss=total / divisor,
        gradient=[value / divisor for value in gradient],
        metrics=metrics.finalize(sums, tokens=tokens, sequences=len(sequences), loss=divisor),
    )

"""Which trajectory is computed by which rank in which pass, and the packed tensors of one pass.

A pass is one forward and backward on every rank at the same time. Every rank plans for all of them from the same
lengths, so the plans agree without talking. A bin holds up to `budget` tokens without padding; a longer trajectory
has a bin of its own. Bins are balanced by cost, linear plus quadratic in length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.algorithm.advantage import contributes_gradient
from app.types import ScoredGroup, Trajectory

QUADRATIC_TOKENS = 16384  # length at which attention costs as much as everything that is linear in it


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trajectory with its advantage, as the trainer counts it."""

    trajectory: Trajectory
    advantage: float
    weight: float  # 0: earns no gradient, but stays in every denominator
    key: tuple[str, int]  # prompt id and member

    @property
    def tokens(self) -> int:
        return self.trajectory.tokens


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one rank computes in one pass: S sequences packed to T tokens, N of them completion tokens."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, from 0 in each sequence
    cu_seqlens: Tensor  # [S + 1] int32, the borders
    logit_positions: Tensor  # [N] int64, where in T each completion token is predicted from
    targets: Tensor  # [N] int64, the completion tokens
    sequence: Tensor  # [N] int64, which of the S a completion token belongs to
    lengths: Tensor  # [S] float32, completion tokens of each
    advantages: Tensor  # [S] float32
    weight_mask: Tensor  # [S] float32
    rollout_logprobs: Tensor  # [N] float32
    keys: tuple[tuple[str, int], ...]  # of the S sequences; empty for a dummy pass

    @property
    def dummy(self) -> bool:
        """A pass that only keeps this rank in step with the others."""
        return not self.keys


def samples_of(groups: Sequence[ScoredGroup], *, mask_truncated: bool) -> list[Sample]:
    """The trajectories of these groups, in order. Empty completions stay: they count as sequences."""
    return [
        Sample(
            trajectory,
            float(advantage),
            float(contributes_gradient(trajectory.completion, mask_truncated=mask_truncated)),
            (scored.group.prompt.id, member),
        )
        for scored in groups
        for member, (trajectory, advantage) in enumerate(zip(scored.group.trajectories, scored.advantages, strict=True))
    ]


def cost(tokens: int) -> float:
    """Relative time of a sequence of this many tokens."""
    return tokens + tokens * tokens / QUADRATIC_TOKENS


def plan_passes(lengths: Sequence[int], *, ranks: int, budget: int, alone: bool = False) -> list[list[list[int]]]:
    """Passes × ranks × indices into `lengths`; every index once; every pass has a bin (maybe empty) for every rank.

    `alone` puts each sequence into a bin of its own, for models that cannot tell packed sequences apart.
    """
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if alone:
        bins = [[index] for index in order]
    else:
        wanted = math.ceil(sum(lengths) / budget)
        filled = _fill(order, lengths, budget, max(ranks, math.ceil(wanted / ranks) * ranks), ranks)
        bins = [members for members in filled if members]  # a trajectory above the budget leaves bins over
    bins += [[] for _ in range(-len(bins) % ranks)]
    bins.sort(key=lambda members: -sum(cost(lengths[index]) for index in members))
    return [bins[start : start + ranks] for start in range(0, len(bins), ranks)]


def _fill(order: Sequence[int], lengths: Sequence[int], budget: int, count: int, ranks: int) -> list[list[int]]:
    """Longest first into the cheapest bin that has room; more bins when none has."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for index in order:
        room = [b for b in range(len(bins)) if not bins[b] or tokens[b] + lengths[index] <= budget]
        if not room:
            room = [len(bins)]
            bins += [[] for _ in range(ranks)]
            tokens += [0] * ranks
            costs += [0.0] * ranks
        best = min(room, key=costs.__getitem__)
        bins[best].append(index)
        tokens[best] += lengths[index]
        costs[best] += cost(lengths[index])
    return bins


def full_prefix(lengths: Sequence[int], *, ranks: int, budget: int) -> int:
    """How many of these trajectories, in order, fill whole passes already; the rest waits for more."""
    passes = sum(lengths) // (ranks * budget)
    room, taken = passes * ranks * budget, 0
    for length in lengths:
        if length > room:
            break
        room -= length
        taken += 1
    return taken


def pack(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """The packed tensors of these samples; of none, a dummy pass of one token."""
    if not samples:
        return _dummy(device)
    prompts = [sample.trajectory.prompt.token_ids for sample in samples]
    completions = [sample.trajectory.completion for sample in samples]
    totals = np.array([sample.tokens for sample in samples])
    starts = np.concatenate([[0], totals.cumsum()])
    lengths = np.array([len(completion.token_ids) for completion in completions])
    tokens = [array for pair in zip(prompts, (c.token_ids for c in completions), strict=True) for array in pair]
    # the token at position p is predicted from the hidden state at p - 1
    logit_positions = [
        np.arange(start + len(p) - 1, start + len(p) - 1 + n)
        for start, p, n in zip(starts, prompts, lengths, strict=False)
    ]
    to = lambda values, dtype: torch.as_tensor(np.ascontiguousarray(values), dtype=dtype, device=device)  # noqa: E731
    return MicroBatch(
        input_ids=to(np.concatenate(tokens), torch.int64)[None],
        position_ids=to(np.concatenate([np.arange(total) for total in totals]), torch.int64)[None],
        cu_seqlens=to(starts, torch.int32),
        logit_positions=to(np.concatenate(logit_positions), torch.int64),
        targets=to(np.concatenate([c.token_ids for c in completions]), torch.int64),
        sequence=to(np.repeat(np.arange(len(samples)), lengths), torch.int64),
        lengths=to(lengths, torch.float32),
        advantages=to([sample.advantage for sample in samples], torch.float32),
        weight_mask=to([sample.weight for sample in samples], torch.float32),
        rollout_logprobs=to(np.concatenate([c.logprobs for c in completions]), torch.float32),
        keys=tuple(sample.key for sample in samples),
    )


def _dummy(device: torch.device) -> MicroBatch:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device),
        position_ids=torch.arange(2, device=device)[None],
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32, device=device),
        logit_positions=zero,
        targets=zero,
        sequence=zero,
        lengths=torch.ones(1, device=device),
        advantages=torch.zeros(1, device=device),
        weight_mask=torch.zeros(1, device=device),
        rollout_logprobs=torch.zeros(1, device=device),
        keys=(),
    )

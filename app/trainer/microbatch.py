"""The plan of passes (sequences by pass and rank), and the packed tensors of one microbatch.

A pass is one forward and backward that all ranks run together, each on a microbatch. Every rank plans for all ranks
from the same samples, so the plans agree without communication. A microbatch holds up to `budget` tokens without
padding; a longer sequence gets its own. Microbatches are balanced by the model's own FLOPs.

Sequences of one microbatch that begin with the same prompt share its tokens but the last, whose hidden state predicts
the first sampled token of each: they are packed once, see `app.model.packing`. A plan keeps such sequences together
where that costs less than it saves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from app.algorithm.overlong import contributes_gradient
from app.model.packing import Packing, to_device
from app.trainer.throughput import Cost
from app.types import ScoredGroup, TokenSequence

TOKEN_BYTES = 4  # of a token in `Sample.shared_prefix`
READY_FILL, READY_BALANCE = 0.8, 0.97  # tokens of a pass over its budget; mean cost over the slowest rank's
Passes = list[list[list[int]]]  # indices of sequences by pass and rank
SampleKey = tuple[str, int, int]  # prompt id, member of its group, sequence of its trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence of a trajectory, with the trajectory's advantage."""

    sequence: TokenSequence
    advantage: float
    weight: float  # 0: no gradient, but counted in every denominator
    key: SampleKey
    trajectory_tokens: int  # sampled tokens of all sequences of the trajectory

    @property
    def tokens(self) -> int:
        """Tokens of the sequence, those that were not sampled included."""
        return len(self.sequence.token_ids)

    @property
    def sampled_tokens(self) -> int:
        return len(self.sequence.logprobs)

    @property
    def shared_prefix(self) -> bytes:
        """Tokens that other sequences of the same prompt can share: those before the prompt's last one."""
        return self.sequence.token_ids[: max(self.sequence.opening_tokens - 1, 0)].astype(np.int32).tobytes()


DUMMY = Sample(TokenSequence.demonstration(np.zeros(2, np.int32), np.array([False, True])), 0.0, 0.0, ("", 0, 0), 1)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One rank's input of one pass: S sequences packed to T tokens, N of them sampled."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, from 0 in each sequence
    packing: Packing  # of the sequences
    logit_positions: Tensor  # [N] int64, position in 0..T whose hidden state predicts the sampled token
    targets: Tensor  # [N] int64, sampled tokens
    sequence: Tensor  # [N] int64, index in 0..S of the token's sequence
    lengths: Tensor  # [S] float32, sampled tokens per sequence
    trajectory_tokens: Tensor  # [S] float32, sampled tokens of the sequence's trajectory
    advantages: Tensor  # [S] float32
    weight_mask: Tensor  # [S] float32
    rollout_logprobs: Tensor  # [N] float32
    versions: Tensor  # [N] int64, policy version that sampled the token; -1 of a demonstration
    keys: tuple[SampleKey, ...]  # S keys; empty for a dummy
    trajectories: int  # trajectories that start in this microbatch
    teacher_logprobs: Tensor | None = None  # [N] float32; None without a teacher

    @property
    def dummy(self) -> bool:
        """Whether this rank has no sample in the pass and only takes part in its collectives."""
        return not self.keys


def make_samples(groups: Sequence[ScoredGroup], *, mask_truncated: bool) -> list[Sample]:
    """Flatten groups into samples, in order. Empty completions stay: they count as trajectories."""
    samples: list[Sample] = []
    for scored in groups:
        members = zip(scored.group.trajectories, scored.advantages, strict=True)
        for member, (trajectory, advantage) in enumerate(members):
            weight = float(contributes_gradient(trajectory, mask_truncated=mask_truncated))
            for index, sequence in enumerate(trajectory.sequences):
                key = (scored.group.prompt.id, member, index)
                samples.append(Sample(sequence, float(advantage), weight, key, trajectory.sampled_tokens))
    return samples


def shared_tokens(prefixes: Sequence[bytes]) -> int:
    """Tokens that sequences with these prefixes need not compute, because an earlier one of them does."""
    return sum(map(len, prefixes)) // TOKEN_BYTES - sum(map(len, set(prefixes))) // TOKEN_BYTES


class Workload:
    """Sequences to compute, and what they cost.

    Attributes:
        lengths: Tokens of each sequence.
        prefixes: Of each sequence, see `Sample.shared_prefix`.
    """

    def __init__(self, lengths: Sequence[int], sampled: Sequence[int], prefixes: Sequence[bytes], cost: Cost):
        """`sampled`: tokens of each sequence that need logits; `cost`: the FLOPs of the model."""
        self.lengths, self.prefixes = lengths, prefixes
        self._alone = [cost.of([length], count) for length, count in zip(lengths, sampled, strict=True)]
        self._token = cost.per_token

    @classmethod
    def of(cls, samples: Sequence[Sample], cost: Cost) -> "Workload":
        lengths, sampled = [each.tokens for each in samples], [each.sampled_tokens for each in samples]
        return cls(lengths, sampled, [each.shared_prefix for each in samples], cost)

    def tokens(self, members: Sequence[int]) -> int:
        """Tokens of these sequences, shared ones counted in each."""
        return sum(self.lengths[index] for index in members)

    def flops(self, members: Sequence[int]) -> float:
        """FLOPs of these sequences in one microbatch, which computes shared tokens once."""
        shared = shared_tokens([self.prefixes[index] for index in members]) if len(members) > 1 else 0
        return sum(self._alone[index] for index in members) - self._token * shared


def plan_microbatches(work: Workload, *, ranks: int, budget: int) -> Passes:
    """Assign sequences to microbatches.

    Args:
        work: The sequences.
        ranks: Microbatches per pass.
        budget: Maximum tokens of a microbatch, shared ones counted in each sequence; a longer sequence gets its own.

    Returns:
        Indices of sequences by pass and rank. Every index occurs once. A rank's list may be empty.
    """
    if not work.lengths:
        return []

    def plan(units: Sequence[Sequence[int]]) -> Passes:
        bins = _fill_bins(units, work, ranks=ranks, budget=budget)

        # Every rank takes part in every pass.
        bins += [[] for _ in range(-len(bins) % ranks)]

        # Ranks wait for each other at the end of a pass, so bins of similar cost share one.
        bins.sort(key=work.flops, reverse=True)
        return [bins[start : start + ranks] for start in range(0, len(bins), ranks)]

    def cost_of_plan(passes: Sequence[Sequence[Sequence[int]]]) -> float:
        return sum(max(map(work.flops, by_rank)) for by_rank in passes)

    single = [[index] for index in range(len(work.lengths))]
    return min(plan(single), plan(_units(work, budget)), key=cost_of_plan)


def ready_passes(work: Workload, *, ranks: int, budget: int) -> tuple[Passes, list[int]]:
    """Plan sequences that more will follow. Return the passes that are full and balanced, and the other sequences.

    Those fill later passes: without waiting, streamed groups would be computed in a third more passes.
    """
    if sum(work.lengths) < READY_FILL * ranks * budget:
        return [], list(range(len(work.lengths)))

    def ready(by_rank: Sequence[Sequence[int]]) -> bool:
        costs = [work.flops(members) for members in by_rank]
        full = sum(map(work.tokens, by_rank)) >= READY_FILL * ranks * budget
        return full and sum(costs) >= READY_BALANCE * ranks * max(costs)

    passes = [by_rank for by_rank in plan_microbatches(work, ranks=ranks, budget=budget) if ready(by_rank)]
    computed = {index for by_rank in passes for members in by_rank for index in members}
    return passes, [index for index in range(len(work.lengths)) if index not in computed]


def _units(work: Workload, budget: int) -> list[list[int]]:
    """Sequences with the same prefix, in units of at most `budget` tokens."""
    units: list[list[int]] = []
    last: dict[bytes, list[int]] = {}  # unit of each prefix that may have space
    for index, prefix in enumerate(work.prefixes):
        unit = last.get(prefix)
        if unit is None or work.tokens(unit) + work.lengths[index] > budget:
            unit = last[prefix] = []
            units.append(unit)
        unit.append(index)
    return units


def _fill_bins(units: Sequence[Sequence[int]], work: Workload, *, ranks: int, budget: int) -> list[list[int]]:
    """Put each unit into the cheapest bin with space for it. Add bins for one more pass when there is none."""
    needed = math.ceil(sum(work.lengths) / budget)
    count = max(ranks, math.ceil(needed / ranks) * ranks)
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count

    # Heaps, so that 8,192 sequences are planned in a fraction of a second.
    by_cost = [(0.0, number) for number in range(count)]  # bins that may have space
    full: list[tuple[int, float, int]] = []  # those without space for a unit before, by their space

    by_size = sorted(((work.flops(unit), unit) for unit in units), key=lambda each: (-each[0], each[1][0]))
    for unit_cost, unit in by_size:
        size = work.tokens(unit)
        while full and -full[0][0] >= size:
            heappush(by_cost, heappop(full)[1:])
        while by_cost and bins[by_cost[0][1]] and tokens[by_cost[0][1]] + size > budget:
            bin_cost, number = heappop(by_cost)
            heappush(full, (tokens[number] - budget, bin_cost, number))
        if not by_cost:
            by_cost = [(0.0, len(bins) + number) for number in range(ranks)]
            bins += [[] for _ in range(ranks)]
            tokens += [0] * ranks

        bin_cost, number = heappop(by_cost)
        bins[number] += unit
        tokens[number] += size
        heappush(by_cost, (bin_cost + unit_cost, number))

    # A sequence above the budget takes the tokens of several bins, which stay empty.
    return [members for members in bins if members]


def pack(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """Pack samples end to end, each shared prefix once. Without samples, return a dummy of two tokens and weight 0."""
    if not samples:
        return replace(pack([DUMMY], device), keys=(), trajectories=0)

    sequences = [sample.sequence for sample in samples]
    totals = np.array([sample.tokens for sample in samples])
    lengths = np.array([sample.sampled_tokens for sample in samples])
    boundaries = np.concatenate([[0], totals.cumsum()])
    tokens = np.concatenate([sequence.token_ids for sequence in sequences])
    positions = np.concatenate([np.arange(total) for total in totals])
    sampled = np.flatnonzero(np.concatenate([sequence.sampled for sequence in sequences]))

    scored = [sequence.teacher_logprobs for sequence in sequences if sequence.teacher_logprobs is not None]
    teacher = np.concatenate(scored) if len(scored) == len(sequences) else None

    # Index in 0..T of each token of the expanded sequences. Of a shared prefix only the first copy is packed.
    first = _first_occurrences(samples, boundaries)
    own = first == np.arange(len(first))
    packed = (own.cumsum() - 1)[first]

    def tensor(values: ArrayLike, dtype: torch.dtype) -> Tensor:
        return to_device(torch.as_tensor(np.ascontiguousarray(values), dtype=dtype), device)

    return MicroBatch(
        input_ids=tensor(tokens[own], torch.int64)[None],
        position_ids=tensor(positions[own], torch.int64)[None],
        packing=Packing.of(boundaries.tolist(), device, None if own.all() else packed),
        # The hidden state at position p - 1 predicts the token at position p. No sequence begins with a sampled token.
        logit_positions=tensor(packed[sampled - 1], torch.int64),
        targets=tensor(tokens[sampled], torch.int64),
        sequence=tensor(np.repeat(np.arange(len(samples)), lengths), torch.int64),
        lengths=tensor(lengths, torch.float32),
        trajectory_tokens=tensor([sample.trajectory_tokens for sample in samples], torch.float32),
        advantages=tensor([sample.advantage for sample in samples], torch.float32),
        weight_mask=tensor([sample.weight for sample in samples], torch.float32),
        rollout_logprobs=tensor(np.concatenate([sequence.logprobs for sequence in sequences]), torch.float32),
        versions=tensor(np.concatenate([sequence.versions for sequence in sequences]), torch.int64),
        keys=tuple(sample.key for sample in samples),
        trajectories=sum(sample.key[2] == 0 for sample in samples),  # each counts with its first sequence
        teacher_logprobs=None if teacher is None else tensor(teacher, torch.float32),
    )


def _first_occurrences(samples: Sequence[Sample], boundaries: np.ndarray) -> np.ndarray:
    """Map each position [E] of the expanded samples to the first copy of its token."""
    positions = np.arange(boundaries[-1])
    starts: dict[bytes, int] = {}
    for sample, start in zip(samples, boundaries[:-1].tolist(), strict=True):
        prefix = sample.shared_prefix
        size = len(prefix) // TOKEN_BYTES
        positions[start : start + size] = np.arange(size) + starts.setdefault(prefix, start)
    return positions

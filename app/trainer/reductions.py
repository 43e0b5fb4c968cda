"""The collectives of a step, except FSDP2's own: raw sums and old log-probabilities over all ranks.

Both run on the host. Without a process group, or with one rank, they return their input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist
from torch import Tensor

from app.algorithm.loss import LossSums
from app.algorithm.metrics import EXTREMES, TABLE, Denominator, merge
from app.trainer.microbatch import MicroBatch, Sample, SampleKey


@dataclass(frozen=True, slots=True)
class RawSums:
    """Counts and raw metric sums of some microbatches, to be divided once all are known."""

    tokens: float = 0.0  # sampled tokens, masked ones included
    sequences: float = 0.0  # trajectories, however many sequences they have
    input_tokens: float = 0.0  # sampled or not, of every sequence
    shared_tokens: float = 0.0  # of these: computed for another sequence
    padding_tokens: float = 0.0  # of dummies
    demonstrated: float = 0.0  # tokens of demonstrations that are trained on
    sums: Mapping[str, float] = field(default_factory=dict)  # by name, see `algorithm.metrics.TABLE`

    @classmethod
    def counts(cls, micro: MicroBatch, *, demonstrations: bool = False) -> "RawSums":
        """Return the counts of one microbatch. A dummy's tokens are padding and in no denominator."""
        computed = float(micro.input_ids.numel())
        if micro.dummy:
            return cls(padding_tokens=computed)
        tokens = float(micro.packing.boundaries[-1])
        counted = float(len(micro.targets))
        if demonstrations:
            return cls(input_tokens=tokens, shared_tokens=tokens - computed, demonstrated=counted)
        return cls(counted, float(micro.trajectories), tokens, tokens - computed)

    def _counts(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "sums"}

    def __add__(self, other: "RawSums") -> "RawSums":
        theirs = other._counts()
        counts = {name: count + theirs[name] for name, count in self._counts().items()}
        return RawSums(**counts, sums=merge(self.sums, other.sums))

    def all_reduce(self) -> "RawSums":
        """Merge the sums of all ranks, in float64. A collective."""
        if _single_rank():
            return self

        names = list(TABLE)
        counts = self._counts()
        present = [float(name in self.sums) for name in names]
        addends = [0.0 if TABLE[name] in EXTREMES else self.sums.get(name, 0.0) for name in names]
        summed = torch.tensor([*counts.values(), *present, *addends], dtype=torch.float64)
        dist.all_reduce(summed)

        # One max reduction serves both extremes: min(x) = -max(-x).
        sign = {name: -1.0 if TABLE[name] is Denominator.min else 1.0 for name in names}
        maxima = [sign[name] * self.sums[name] if name in self.sums else -torch.inf for name in names]
        extremes = torch.tensor(maxima, dtype=torch.float64)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)

        counted, present, totals = (values.tolist() for values in summed.split([len(counts), len(names), len(names)]))
        sums = {
            name: sign[name] * extreme if TABLE[name] in EXTREMES else total
            for name, on_ranks, total, extreme in zip(names, present, totals, extremes.tolist(), strict=True)
            if on_ranks
        }
        return RawSums(**dict(zip(counts, counted, strict=True)), sums=sums)


class UnreadSums:
    """Metric sums of an update's microbatches, left on the device so that the host can run ahead of it."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, ...], list[Tensor]] = {}  # [sums] each, by the names of the sums

    def add(self, loss_sums: LossSums) -> None:
        """Keep the sums of a microbatch, a few numbers. Those of policy and demonstrations have other names."""
        self._values.setdefault(tuple(loss_sums.sums), []).append(loss_sums.stack())

    def read(self) -> RawSums:
        """Return the merged sums and forget them. The host waits for the device, once."""
        sums: Mapping[str, float] = {}
        for names, stacked in self._values.items():
            for values in torch.stack(stacked).tolist():
                sums = merge(sums, dict(zip(names, values, strict=True)))
        self._values.clear()
        return RawSums(sums=sums)


def all_gather_logprobs(own: Mapping[SampleKey, Tensor], samples: Sequence[Sample]) -> dict[SampleKey, Tensor]:
    """Return the log-probabilities [T] of all samples, of which each rank computed some. A collective."""
    if _single_rank() or not samples:
        return dict(own)

    # Each sample was computed by one rank; the others add zeros.
    lengths = [sample.sampled_tokens for sample in samples]
    flat = torch.cat([own.get(sample.key, torch.zeros(n)) for sample, n in zip(samples, lengths, strict=True)])
    dist.all_reduce(flat)
    return {sample.key: logprobs for sample, logprobs in zip(samples, flat.split(lengths), strict=True)}


def _single_rank() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1

"""The split train step of one rank: CLOSED → begin → OPEN → groups… → finish or abort → CLOSED.

What always holds: microbatches are computed with a denominator of 1; token and sequence counts accumulate in float64;
`finish` reduces the counts over the ranks, divides the gradients once, clips, updates. So neither the number of pieces
a step was fed in nor the number of ranks changes the result. `abort` leaves parameters and optimizer as they were.
The idea of the split is NeMo-RL's (2026), there for Megatron; this is its FSDP2 form: gradient accumulation in sharded
`.grad` is linear, so dividing at the end is exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
import torch.distributed as dist

from app.algorithm import loss as losses
from app.algorithm import metrics as tables
from app.algorithm.metrics import Over
from app.config.algorithm import AlgorithmConfig, Correction
from app.errors import TrainerError
from app.model.policy import PolicyModel, packs_sequences
from app.trainer.fsdp_reset import reset_fsdp_state
from app.trainer.microbatch import MicroBatch, Sample, full_prefix, pack, plan_passes, samples_of
from app.trainer.optimizer import Optimizer
from app.trainer.throughput import ModelFlops, PhaseTimer, throughput_metrics
from app.types import ScoredGroup, StepReport

Key = tuple[str, int]  # prompt id and member
EXTREMES = (Over.max, Over.min)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step needs to know of the configuration."""

    algorithm: AlgorithmConfig
    correction: Correction  # resolved
    temperature: float
    max_completion_tokens: int
    tokens_per_microbatch: int  # per rank and pass


@dataclass(slots=True)
class Accumulated:
    """What an update has seen so far on this rank."""

    tokens: float = 0.0  # completion tokens, masked ones included
    sequences: float = 0.0
    input_tokens: float = 0.0  # prompt and completion
    padding_tokens: float = 0.0  # of dummy passes
    sums: dict[str, float] = field(default_factory=dict)


class TrainStep:
    """One rank's step; every rank makes the same calls in the same order."""

    def __init__(
        self,
        model: PolicyModel,
        optimizer: Optimizer,
        settings: StepSettings,
        device: torch.device,
        reference: PolicyModel | None = None,
        peak_flops: float | None = None,  # of one device, FLOP/s
    ):
        self.model, self.optimizer, self.settings, self.device = model, optimizer, settings, device
        self.reference, self.peak_flops, self._cost = reference, peak_flops, ModelFlops.of(model)
        self.packs = packs_sequences(model.config, model.attention)  # whether the model tells packed sequences apart
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.version: int | None = 0  # the policy that the parameters are; None in the middle of a step's updates
        self._version: int | None = None  # of the open step
        self._old: dict[Key, torch.Tensor] = {}
        self._forget()

    @property
    def open(self) -> bool:
        return self._version is not None

    def begin(self, version: int) -> None:
        if self.open:
            raise TrainerError(f"begin_step({version}) while the step of version {self._version} is open")
        self._forget()
        self._version = version

    def feed(self, groups: Sequence[ScoredGroup]) -> None:
        """Take groups; with one update a step, whatever fills whole passes is computed now, else all at the end."""
        self._require_open("add_groups")
        fed = samples_of(groups, mask_truncated=self.settings.algorithm.mask_truncated)
        self._groups.append(len(groups))
        self._pending.extend(fed)
        self._flops += sum(self._cost.sequence(each.tokens, len(each.trajectory.completion.token_ids)) for each in fed)
        if self.settings.algorithm.updates_per_step == 1:
            lengths = [sample.tokens for sample in self._pending]
            taken = full_prefix(lengths, ranks=self.ranks, budget=self.settings.tokens_per_microbatch)
            self._compute(self._pending[:taken])
            del self._pending[:taken]

    def finish(self) -> StepReport:
        """Compute what is left, update, and report."""
        self._require_open("finish_step")
        assert self._version is not None
        algorithm = self.settings.algorithm
        if algorithm.updates_per_step == 1:
            self._compute(self._pending)
            self._update()
        else:
            per_update = algorithm.prompts_per_update * algorithm.group_size
            for start in range(0, max(len(self._pending), 1), per_update):
                self._compute(self._pending[start : start + per_update])
                self._update()
        report = StepReport(self._version, self._updates, self._metrics())
        self.version = self._version
        self._close()
        return report

    def abort(self) -> None:
        """Forget the open step. Harmless when none is open; after a pass that raised, the model is put in order."""
        if self._in_pass:
            for model in filter(None, (self.model, self.reference)):
                reset_fsdp_state(model)
        self._close()

    def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        """Fix π_old of these groups at the current parameters, for all updates of the step."""
        self._require_open("old_logprobs")
        samples = samples_of(groups, mask_truncated=False)
        mine: dict[Key, torch.Tensor] = {}
        with torch.no_grad():
            self._for_each_pass(samples, lambda micro: mine.update(self._old_of(micro)))
        self._old |= _share(mine, samples)  # further groups may follow

    # --- inside

    def _require_open(self, call: str) -> None:
        if not self.open:
            raise TrainerError(f"{call} without an open step: call begin_step first")

    def _forget(self) -> None:
        self._pending: list[Sample] = []
        self._groups: list[int] = []
        self._old = {}
        self._now = Accumulated()
        self._total = Accumulated()
        self._updates = 0
        self._in_pass = False  # stays true when a pass raises
        self._update_metrics: dict[str, float] = {}
        self._watch = PhaseTimer(self.device)
        self._flops = 0.0  # of all ranks

    def _close(self) -> None:
        self._version = None
        self.optimizer.zero_grad()
        self._forget()

    def _for_each_pass(self, samples: Sequence[Sample], work: Callable[[MicroBatch], None]) -> None:
        settings = self.settings
        passes = plan_passes(
            [sample.tokens for sample in samples],
            ranks=self.ranks,
            budget=settings.tokens_per_microbatch,
            alone=not self.packs,
        )
        for bins in passes:
            self._in_pass = True
            work(pack([samples[index] for index in bins[self.rank]], self.device))
            self._in_pass = False

    def _compute(self, samples: Sequence[Sample]) -> None:
        self._for_each_pass(samples, self._forward_backward)

    def _forward(
        self, model: PolicyModel, micro: MicroBatch, *, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return model(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            cu_seqlens=micro.cu_seqlens,
            logit_positions=micro.logit_positions,
            targets=micro.targets,
            temperature=self.settings.temperature,
            entropy_gradient=entropy_gradient,
        )

    def _old_of(self, micro: MicroBatch) -> dict[Key, torch.Tensor]:
        logprobs, _ = self._forward(self.model, micro)
        if micro.dummy:
            return {}
        pieces = logprobs.split([int(length) for length in micro.lengths.tolist()])
        return dict(zip(micro.keys, (piece.cpu() for piece in pieces), strict=True))

    def _forward_backward(self, micro: MicroBatch) -> None:
        algorithm = self.settings.algorithm
        reference = None
        with self._watch.phase("forward"):
            if self.reference is not None:
                with torch.no_grad():
                    reference, _ = self._forward(self.reference, micro)
            logprobs, entropy = self._forward(self.model, micro, entropy_gradient=algorithm.entropy_coefficient > 0)
        old = None
        if self._old and not micro.dummy:
            old = torch.cat([self._old[key] for key in micro.keys]).to(logprobs.device)
        batch = losses.TokenBatch(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=logprobs.detach() if micro.dummy else micro.rollout_logprobs,
            reference_logprobs=reference,
            entropy=entropy,
            sequence=micro.sequence,
            advantages=micro.advantages,
            lengths=micro.lengths,
            weight_mask=micro.weight_mask,
        )
        with self._watch.phase("backward"):
            result = losses.policy_loss(batch, algorithm, self.settings.correction)
            result.loss.backward()
        if micro.dummy:
            self._now.padding_tokens += micro.input_ids.numel()
            return
        self._now.tokens += len(micro.targets)
        self._now.sequences += len(micro.keys)
        self._now.input_tokens += micro.input_ids.numel()
        self._now.sums = tables.merge(self._now.sums, result.floats())

    def _update(self) -> None:
        """One optimizer update from what was accumulated, with the denominators of all ranks."""
        counted = _reduce(self._now)
        denominator = losses.denominator(
            self.settings.algorithm,
            tokens=counted.tokens,
            sequences=counted.sequences,
            max_completion_tokens=self.settings.max_completion_tokens,
        )
        self.version = None
        # FSDP2 averages over the ranks; what is wanted is the sum over them, divided once
        with self._watch.phase("optimizer"):
            outcome = self.optimizer.update(scale=self.ranks / max(denominator, 1.0))
        self._updates += outcome.applied
        self._update_metrics |= {
            "grad_norm": outcome.grad_norm,
            "lr": outcome.lr,
            "updates/skipped": self._update_metrics.get("updates/skipped", 0.0) + (not isfinite(outcome.grad_norm)),
        }
        self._total = _add(self._total, counted)
        self._now = Accumulated()

    def _metrics(self) -> dict[str, float]:
        total = self._total
        loss = losses.denominator(
            self.settings.algorithm,
            tokens=total.tokens,
            sequences=total.sequences,
            max_completion_tokens=self.settings.max_completion_tokens,
        )
        sums = total.sums or dict.fromkeys(tables.TABLE, 0.0)  # a step without trajectories has a full line too
        metrics = tables.finalize(sums, tokens=total.tokens, sequences=total.sequences, loss=loss)
        computed = total.input_tokens + total.padding_tokens
        speed = throughput_metrics(
            self._watch.seconds(),
            tokens=total.input_tokens,
            flops=self._flops,
            ranks=self.ranks,
            peak_flops=self.peak_flops,
        )
        return {
            **metrics,
            **self._update_metrics,
            **speed,
            "trainer/tokens": total.input_tokens,
            "trainer/padding_fraction": total.padding_tokens / computed if computed else 0.0,
        }


def _add(one: Accumulated, other: Accumulated) -> Accumulated:
    return Accumulated(
        one.tokens + other.tokens,
        one.sequences + other.sequences,
        one.input_tokens + other.input_tokens,
        one.padding_tokens + other.padding_tokens,
        tables.merge(one.sums, other.sums),
    )


def _reduce(mine: Accumulated) -> Accumulated:
    """The counts and sums of all ranks together, in float64 on the host."""
    if _alone():
        return mine
    names = list(tables.TABLE)
    counts = [mine.tokens, mine.sequences, mine.input_tokens, mine.padding_tokens]
    present = [float(name in mine.sums) for name in names]
    added = [mine.sums.get(name, 0.0) if tables.TABLE[name] not in EXTREMES else 0.0 for name in names]
    # min is max of the negative
    sign = {name: -1.0 if tables.TABLE[name] is Over.min else 1.0 for name in names}
    largest = [sign[name] * mine.sums[name] if name in mine.sums else -float("inf") for name in names]
    total = torch.tensor([*counts, *present, *added], dtype=torch.float64)
    extremes = torch.tensor(largest, dtype=torch.float64)
    dist.all_reduce(total)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    summed = total.tolist()
    seen, sums = summed[4 : 4 + len(names)], summed[4 + len(names) :]
    return Accumulated(
        summed[0],
        summed[1],
        summed[2],
        summed[3],
        {
            name: sign[name] * extremes[i].item() if tables.TABLE[name] in EXTREMES else sums[i]
            for i, name in enumerate(names)
            if seen[i]
        },
    )


def _share(mine: Mapping[Key, torch.Tensor], samples: Sequence[Sample]) -> dict[Key, torch.Tensor]:
    """What every rank remembered, on every rank: the passes of an update are planned anew."""
    if _alone():
        return dict(mine)
    lengths = [len(sample.trajectory.completion.token_ids) for sample in samples]
    flat = torch.cat([mine.get(sample.key, torch.zeros(n)) for sample, n in zip(samples, lengths, strict=True)])
    dist.all_reduce(flat)
    return {sample.key: piece for sample, piece in zip(samples, flat.split(lengths), strict=True)}


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1

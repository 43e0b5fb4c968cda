"""The train step of one rank, split into begin, add groups, and finish.

    CLOSED ── begin(version) ──→ OPEN ──┬── finish() ──→ CLOSED, the parameters are policy `version`
                                 ↑   │  └── abort() ───→ CLOSED, nothing changed
                                 └───┘ add_groups(groups), add_demonstrations(sequences), any number of times

    microbatch   forward → raw loss sum → backward, gradients accumulate in FSDP2's sharded `.grad`
    update       all-reduce the counts → divide the gradients once → clip → optimizer update
    step         one update, or `algorithm.updates_per_step` of them → report

Invariants:
- A microbatch's loss is a raw sum (denominator 1). Token and sequence counts accumulate in float64. An update reduces
  the counts over the ranks and divides once. So neither the number of `add_groups` calls nor the number of ranks
  changes the result.
- `abort` leaves parameters and optimizer as they were before the call.

The split follows NeMo-RL (2026), which has it for Megatron. In this FSDP2 form, accumulation in sharded `.grad` is
linear, so dividing at the end is exact.
"""

import gc
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from app.algorithm.loss import Component, LossSums, common_denominator, demonstration_loss, denominators, policy_loss
from app.algorithm.metrics import TABLE, finalize
from app.algorithm.objective import TokenBatch
from app.config.algorithm import AlgorithmConfig, Correction
from app.config.teacher import TeacherConfig
from app.errors import TrainerError
from app.model.lora.layer import adapters_off
from app.model.packing import to_device
from app.model.parallelize import reset_fsdp_state, reshard
from app.model.policy import PolicyModel
from app.trainer.microbatch import (
    MicroBatch,
    Passes,
    Sample,
    SampleKey,
    Workload,
    make_samples,
    pack,
    plan_microbatches,
    ready_passes,
)
from app.trainer.optimizer import PolicyOptimizer, UpdateResult, update_metrics
from app.trainer.reductions import RawSums, UnreadSums, all_gather_logprobs
from app.trainer.throughput import Cost, EventTimer, ModelFlops, throughput_metrics
from app.types import ScoredGroup, StepReport, TokenSequence
from app.utils.phase_timer import PhaseTimer
from app.utils.process import trim_heap

HOLD_TIMEOUT_S = 60.0  # how long a rank in `hold` waits for the driver's second call
COLLECT_PASSES = 16  # between collections of garbage
TRIM_INTERVAL_S = 20.0  # between returns of the heap's free pages; at 1 s a pass of 2 s took a quarter longer


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of a step."""

    algorithm: AlgorithmConfig
    correction: Correction  # resolved, never `auto`
    temperature: float
    max_completion_tokens: int
    tokens_per_microbatch: int  # per rank and pass
    teacher: TeacherConfig = field(default_factory=TeacherConfig)


@dataclass(eq=False)
class TrainStep:
    """One rank's train step. All ranks make the same calls in the same order.

    Example, with two `add_groups` calls::

        step.begin(version=8)
        step.old_logprobs(groups)         # only if `AlgorithmConfig.needs_old_logprobs`
        step.add_groups(groups[:4])       # computes the passes that are ready
        step.add_groups(groups[4:])
        report = step.finish()            # computes the rest and updates the parameters
        report.metrics["grad_norm"]       # 0.41
        step.version                      # 8
    """

    model: PolicyModel
    optimizer: PolicyOptimizer
    settings: StepSettings
    device: torch.device
    reference: PolicyModel | None = None  # of the KL: a frozen model, or `model` itself with its adapters off
    peak_flops: float | None = None  # FLOP/s of one device, for `trainer/mfu`; None if unknown

    def __post_init__(self) -> None:
        self.model_flops = ModelFlops.of(self.model)
        self.cost = self.model_flops.step
        if self.reference is not None:
            self.cost += ModelFlops.of(self.reference, adapters=False).forward
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.gate = PassGate()  # through which another thread ends an open step
        self.version: int | None = 0  # policy version of the parameters; None between the updates of a step
        self._open_version: int | None = None
        self._reset()

    @property
    def open(self) -> bool:
        return self._open_version is not None

    # --- lifecycle

    def begin(self, version: int) -> None:
        """Open the step that produces policy `version`."""
        if self.open:
            raise TrainerError(f"begin_step({version}) while the step of version {self._open_version} is open")
        self._reset()
        self._open_version = version

    def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None:
        """Compute π_old of these groups at the current parameters, for all updates of the step."""
        self._require_open("old_logprobs")
        samples = make_samples(groups, mask_truncated=False)

        with self._timer.phase("old_logprobs"), torch.no_grad():
            micros = self._microbatches(samples, self.model_flops.forward)
            computed = [(micro.keys, self._forward(self.model, micro)[0]) for micro in micros]
            # Each update redistributes the samples over the ranks, so every rank needs all of them.
            self._old_logprobs |= all_gather_logprobs(_by_sample(computed, samples), samples)

    def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        """Add groups. With one update per step, compute the passes that are ready; else wait for `finish`."""
        self._require_open("add_groups")
        algorithm = self.settings.algorithm
        self._pending += make_samples(groups, mask_truncated=algorithm.mask_truncated)

        if algorithm.updates_per_step == 1:
            work = Workload.of(self._pending, self.cost)
            passes, waiting = ready_passes(work, ranks=self.ranks, budget=self.settings.tokens_per_microbatch)
            self._accumulate(self._pending, passes)
            self._pending[:] = [self._pending[index] for index in waiting]

    def add_demonstrations(self, sequences: Sequence[TokenSequence]) -> None:
        """Add sequences whose marked tokens are imitated (component ce), spread over the updates of the step."""
        self._require_open("add_demonstrations")
        self._demonstrations += _demonstration_samples(sequences, first=len(self._demonstrations))

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return log π of the sampled tokens of each sequence, [N] float32, at temperature 1. A collective.

        Before the first update of a step, or between steps. No part of the step's FLOPs.
        """
        samples = _demonstration_samples(sequences, first=0)
        with torch.no_grad():
            micros = self._microbatches(samples, self.model_flops.forward, counted=False)
            computed = [(micro.keys, self._forward(self.model, micro, temperature=1.0)[0]) for micro in micros]
        reshard(self.model)  # else the next pass could begin with weights from before an update

        gathered = all_gather_logprobs(_by_sample(computed, samples), samples)
        return [gathered[sample.key].numpy() for sample in samples]

    def finish(self) -> StepReport:
        """Compute the pending samples, update the parameters and close the step."""
        self._require_open("finish_step")
        assert self._open_version is not None

        updates = list(_by_update(self._pending, self.settings.algorithm))
        for number, samples in enumerate(updates):
            self._accumulate(samples)
            self._accumulate_demonstrations(self._demonstrations[number :: len(updates)])
            self._update()

        report = StepReport(self._open_version, sum(each.applied for each in self._results), self._metrics())
        self.version = self._open_version
        self._close()
        return report

    def abort(self) -> None:
        """Discard the open step. Idempotent. After a failed pass, also reset FSDP2's state."""
        try:
            if self._in_pass:
                # Once, if the policy is its own reference.
                for model in dict.fromkeys((self.model, self.reference)):
                    if model is not None:
                        reset_fsdp_state(model)
        finally:
            self._close()

    def _require_open(self, call: str) -> None:
        if not self.open:
            raise TrainerError(f"{call} without an open step: call begin_step first")

    def _close(self) -> None:
        self._open_version = None
        self.optimizer.zero_grad()
        self._reset()

    def _reset(self) -> None:
        self._pending: list[Sample] = []
        self._demonstrations: list[Sample] = []
        self._old_logprobs: dict[SampleKey, Tensor] = {}  # [T] each
        self._sums = RawSums()  # this rank, current update
        self._unread = UnreadSums()  # the metrics of the same, on the device
        self._totals = RawSums()  # all ranks, finished updates
        self._results: list[UpdateResult] = []  # one per update
        self._flops = 0.0  # all ranks
        self._timer = PhaseTimer() if self.device.type == "cpu" else EventTimer(self.device)
        self._in_pass = False  # stays True if a pass raises
        self._memory = PassMemory(self.device)
        self.gate.reset()

    # --- microbatches

    def _microbatches(
        self, samples: Sequence[Sample], cost: Cost, passes: Passes | None = None, *, counted: bool = True
    ) -> Iterator[MicroBatch]:
        """Yield this rank's microbatch of each pass, by default of all samples.

        A pass lasts until the next one is requested. Its FLOPs are those of the step if `counted`.
        """
        work = Workload.of(samples, cost)
        if passes is None:
            passes = plan_microbatches(work, ranks=self.ranks, budget=self.settings.tokens_per_microbatch)
        for by_rank in passes:
            self._flops += sum(map(work.flops, by_rank)) if counted else 0
            self.gate.enter()
            self._memory.free()
            self._in_pass = True
            yield pack([samples[index] for index in by_rank[self.rank]], self.device)
            self._in_pass = False

    def _accumulate(self, samples: Sequence[Sample], passes: Passes | None = None) -> None:
        """Add the gradients, counts and metrics of these samples, or of some passes of them, to the current update."""
        for micro in self._microbatches(samples, self.cost, passes):
            loss_sums = self._forward_backward(micro)
            self._sums += RawSums.counts(micro)
            if not micro.dummy:
                self._unread.add(loss_sums)

    def _accumulate_demonstrations(self, samples: Sequence[Sample]) -> None:
        """Add the component ce to the current update, whose sampled tokens are all counted by now."""
        if not samples:
            return
        demonstrated = RawSums(demonstrated=sum(sample.sampled_tokens for sample in samples))
        divisors = _denominators(self._sums.all_reduce() + demonstrated, self.settings)
        weight = self.settings.algorithm.ce_coefficient * common_denominator(divisors)
        coefficient = weight / max(divisors[Component.ce], 1.0)  # c · N / N_ce
        for micro in self._microbatches(samples, self.model_flops.step):
            with self._timer.phase("forward"):
                logprobs, _ = self._forward(self.model, micro, temperature=1.0)
            with self._timer.phase("backward"):
                loss_sums = demonstration_loss(logprobs, micro.weight_mask[micro.sequence], coefficient)
                loss_sums.loss.backward()
            self._sums += RawSums.counts(micro, demonstrations=True)
            if not micro.dummy:
                self._unread.add(loss_sums)

    def _forward_backward(self, micro: MicroBatch) -> LossSums:
        algorithm = self.settings.algorithm
        assert self._open_version is not None
        with self._timer.phase("forward"):
            reference_logprobs = None
            if self.reference is not None:
                with torch.no_grad(), adapters_off(self.reference):
                    reference_logprobs, _ = self._forward(self.reference, micro)
            logprobs, entropy = self._forward(self.model, micro, entropy_gradient=algorithm.entropy_coefficient > 0)

        # A dummy has its own in their place: an objective of the user's finds the same fields on every rank.
        old_logprobs: Tensor | None = None  # the current ones
        teacher_logprobs = micro.teacher_logprobs
        if micro.dummy:
            old_logprobs = logprobs.detach() if self._old_logprobs else None
            teacher_logprobs = logprobs.detach() if self.settings.teacher.given else None
        elif self._old_logprobs:
            old_logprobs = to_device(torch.cat([self._old_logprobs[key] for key in micro.keys]), self.device)
        batch = TokenBatch(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=logprobs.detach() if micro.dummy else micro.rollout_logprobs,
            reference_logprobs=reference_logprobs,
            entropy=entropy,
            sequence=micro.sequence,
            advantages=micro.advantages,
            lengths=micro.lengths,
            trajectory_tokens=micro.trajectory_tokens,
            weight_mask=micro.weight_mask,
            teacher_logprobs=teacher_logprobs,
            teacher=self.settings.teacher,
            same_version=micro.versions == self._open_version - 1,
            first_update=not self._results,
        )
        with self._timer.phase("backward"):
            loss_sums = policy_loss(batch, algorithm, self.settings.correction)
            loss_sums.loss.backward()
        return loss_sums

    def _forward(
        self, model: PolicyModel, micro: MicroBatch, *, entropy_gradient: bool = False, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the sampled tokens, both [N], by default as they were sampled."""
        return model(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            packing=micro.packing,
            logit_positions=micro.logit_positions,
            targets=micro.targets,
            temperature=self.settings.temperature if temperature is None else temperature,
            entropy_gradient=entropy_gradient,
        )

    # --- updates

    def _update(self) -> None:
        """Update the parameters from the accumulated gradients, with the denominator of all ranks."""
        self.gate.enter(update=True)
        with self._timer.phase("optimizer"):
            totals = (self._sums + self._unread.read()).all_reduce()

            # Once updated, the parameters belong to no policy version until the last update of the step.
            before, self.version = self.version, None

            # FSDP2 and the optimizer average gradients over the ranks; the loss is a sum over them, divided once.
            scale = self.ranks / common_denominator(_denominators(totals, self.settings))
            result = self.optimizer.update(scale=scale)
            if not result.applied:
                self.version = before
            self._results.append(result)
            self.optimizer.require_updates()

        self._totals += totals
        self._sums = RawSums()

    def _metrics(self) -> dict[str, float]:
        tokens = self._totals.input_tokens
        return {
            **_loss_metrics(self._totals, self.settings),
            **update_metrics(self._results),
            **throughput_metrics(
                self._timer.seconds(), tokens=tokens, flops=self._flops, ranks=self.ranks, peak_flops=self.peak_flops
            ),
            "time/microbatch_max": self._timer.longest("forward") + self._timer.longest("backward"),
        }


class PassGate:
    """Ends a step before its next pass, after the same pass on every rank.

        driver                               rank
        `hold` on every rank          ──→    no further pass begins; returns how many have begun
        `stop_after` their maximum    ──→    passes up to that one begin, the next one raises

    A pass is full of collectives: if one rank stopped before a pass that another rank has begun, the other would hang
    in it. The ranks agree through the driver, so a pass costs no collective of its own. The thread of the step calls
    `enter`, another one `hold` and `stop_after`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Forget the passes of the last step and whether it was ended."""
        with self._changed:
            self._begun = 0
            self._limit: float | None = math.inf  # passes that may begin; None: held
            self._updating = False

    def enter(self, *, update: bool = False) -> None:
        """Begin a pass, or an update, after which the step runs to its end. Raises `TrainerError` if the step ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._limit is not None, HOLD_TIMEOUT_S):
                raise TrainerError(f"the driver did not end the held step within {HOLD_TIMEOUT_S:.0f} s")
            if self._limit is not None and self._begun >= self._limit:
                raise TrainerError(f"the step was ended after {self._begun} passes")
            self._begun += 1
            if update:
                self._updating = True
                self._limit = math.inf

    def hold(self) -> int:
        """Let no further pass begin, for now. Returns how many have begun."""
        with self._changed:
            if not self._updating:
                self._limit = None
            return self._begun

    def stop_after(self, passes: int) -> None:
        """End the step after this many passes."""
        with self._changed:
            if not self._updating:
                self._limit = passes
            self._changed.notify_all()


class PassMemory:
    """Frees memory between the passes of a step.

    Automatic GC is off, and a cycle may hold tensors: all ranks collect before the same pass. On a CPU the heap keeps
    free pages between tensors of other sizes and grows with each pass: they are returned every `TRIM_INTERVAL_S`.
    """

    def __init__(self, device: torch.device):
        self._on_host = device.type == "cpu"
        self._passes = 0
        self._trimmed_s = time.monotonic()

    def free(self) -> None:
        self._passes += 1
        if self._passes % COLLECT_PASSES == 0:
            gc.collect(0)

        now = time.monotonic()
        if self._on_host and now - self._trimmed_s > TRIM_INTERVAL_S:
            self._trimmed_s = now
            trim_heap()


def _by_update(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> Iterator[Sequence[Sample]]:
    """Yield the samples of each update: those of whole groups. Without samples, yield one empty update."""
    if algorithm.updates_per_step == 1 or not samples:
        yield samples
        return

    groups = [list(members) for _, members in groupby(samples, key=lambda sample: sample.key[0])]
    for start in range(0, len(groups), algorithm.prompts_per_update):
        yield [sample for group in groups[start : start + algorithm.prompts_per_update] for sample in group]


def _denominators(totals: RawSums, settings: StepSettings) -> dict[Component, float]:
    return denominators(
        settings.algorithm,
        tokens=totals.tokens,
        sequences=totals.sequences,
        demonstrated=totals.demonstrated,
        max_completion_tokens=settings.max_completion_tokens,
    )


def _loss_metrics(totals: RawSums, settings: StepSettings) -> dict[str, float]:
    """Return the metrics of the loss and of the tokens that were computed."""
    computed = totals.input_tokens - totals.shared_tokens + totals.padding_tokens
    losses = finalize(
        # A step without trajectories reports every metric as 0.
        totals.sums or dict.fromkeys(TABLE, 0.0),
        tokens=totals.tokens,
        sequences=totals.sequences,
        loss=common_denominator(_denominators(totals, settings)),
        demonstrated=totals.demonstrated,
    )
    return {
        **losses,
        "trainer/tokens": totals.input_tokens,
        "trainer/shared_fraction": totals.shared_tokens / totals.input_tokens if totals.input_tokens else 0.0,
        "trainer/padding_fraction": totals.padding_tokens / computed if computed else 0.0,
    }


def _by_sample(
    computed: Sequence[tuple[tuple[SampleKey, ...], Tensor]], samples: Sequence[Sample]
) -> dict[SampleKey, Tensor]:
    """Split the log-probabilities [N] of microbatches by sample, on the host. The device is waited for once."""
    kept = [each for each in computed if each[0]]  # a dummy has no keys
    if not kept:
        return {}
    lengths = {sample.key: sample.sampled_tokens for sample in samples}
    keys = [key for keys, _ in kept for key in keys]
    flat = torch.cat([logprobs for _, logprobs in kept]).cpu()
    return dict(zip(keys, flat.split([lengths[key] for key in keys]), strict=True))


def _demonstration_samples(sequences: Sequence[TokenSequence], *, first: int) -> list[Sample]:
    """Return demonstrations as samples with keys of their own, numbered from `first`."""
    return [
        Sample(each, 0.0, 1.0, (f"demonstration/{number}", 0, 0), len(each.logprobs))
        for number, each in enumerate(sequences, start=first)
    ]

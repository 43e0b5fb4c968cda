"""The configuration of a run: one dataclass per section, and the rules across sections."""

import math
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path

from app.config.algorithm import AlgorithmConfig, Correction, OldPolicy
from app.config.checkpoint import CheckpointConfig
from app.config.cluster import ClusterConfig
from app.config.data import DataConfig
from app.config.device import DeviceConfig, DeviceKind
from app.config.engine_flags import check_engine_flags
from app.config.environment import EnvironmentConfig, EnvironmentKind
from app.config.eval import EvalConfig
from app.config.model import ModelConfig
from app.config.offload import OffloadConfig
from app.config.placement import PlacementConfig, Stream
from app.config.recovery import RecoveryConfig
from app.config.reward import COMPARING, RewardConfig
from app.config.rollout import DRAFTS, NO_DRAFTS, OWN_HEAD, RolloutConfig
from app.config.setting import check_bounds, setting
from app.config.stop import StopConfig
from app.config.teacher import TeacherConfig
from app.config.tracking import TrackingConfig
from app.config.trainer import TrainerConfig
from app.config.weight_sync import Verify, WeightSyncConfig, transport_of
from app.errors import expect


class Mode(Enum):
    """What the command does; each mode is a module or package of `app.mode`."""

    train = "train"
    sft = "sft"
    eval = "eval"
    plan = "plan"
    doctor = "doctor"
    parity = "parity"
    export = "export"
    report = "report"

    @property
    def trains(self) -> bool:
        """Whether the mode makes steps of a run that can be resumed."""
        return self in (Mode.train, Mode.sft)


@dataclass
class RunConfig:
    """Mode, seed, length and resumption of a run, and one section per package."""

    mode: Mode = setting(
        Mode.train,
        "train trains by reinforcement; sft imitates the replies of rows; eval evaluates a model or, with resume, a "
        "checkpoint; plan prints devices, batches and a memory estimate; doctor checks this machine; parity compares "
        "the device's numbers with a float32 CPU reference; export writes a checkpoint as a Hugging Face directory; "
        "report writes report.html.",
    )
    seed: int = setting(0, "Seed of the data order and of sampling.", at_least=0, at_most=2**31 - 1)
    steps: int = setting(60, "Training steps of the run.", at_least=1)
    epochs: float | None = setting(
        None,
        "Times, at least, that the run trains on every training row; sets its steps. null trains for the given steps.",
        above=0,
    )
    resume: str = setting(
        "never",
        "never refuses a folder that holds a run, auto resumes the run in hydra.run.dir or starts it, the path of a "
        "run or checkpoint resumes that; in mode=eval the path names the checkpoint to evaluate.",
        noun="never, auto or a path",
    )
    device: DeviceConfig = field(default_factory=DeviceConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def engines(self) -> int:
        """Number of engines. A supervised run has none, unless it is evaluated."""
        if not self.evaluates:
            return 0
        return len(self.rollout.urls) or self.placement.engine_devices // self.rollout.tensor_parallel

    @property
    def optimizer_updates(self) -> int:
        """Optimizer updates of the whole run, over which the learning rate decays."""
        return self.steps * (1 if self.mode is Mode.sft else self.algorithm.updates_per_step)

    @property
    def trained_by(self) -> str:
        return Mode.sft.name if self.mode is Mode.sft else self.algorithm.name

    @property
    def evaluates(self) -> bool:
        """Whether completions are sampled: a supervised run does it for `eval.every` alone."""
        return self.mode is not Mode.sft or self.eval.every > 0

    @property
    def shared_devices(self) -> bool:
        """Whether each engine rank shares a device with a trainer rank."""
        return self.placement.colocated and not self.rollout.urls

    @property
    def requests_per_engine(self) -> int:
        """The most completions in flight on each engine while training, spread evenly."""
        return math.ceil(self.groups_in_flight * self.algorithm.group_size / max(1, self.engines))

    @property
    def groups_in_flight(self) -> int:
        admitted = (self.placement.max_staleness + 1) * self.algorithm.prompts_per_step
        return min(self.rollout.max_inflight_groups or admitted, admitted)

    @property
    def stream(self) -> bool:
        """Whether groups are trained on as they arrive."""
        possible = not self.placement.colocated and self.algorithm.updates_per_step == 1
        return possible and self.placement.stream is not Stream.off

    @property
    def correction(self) -> Correction:
        """The correction in force: `auto` resolved."""
        stale = self.placement.max_staleness > 0 and self.algorithm.old_policy is OldPolicy.trainer
        automatic = Correction.tis if stale else Correction.none
        return automatic if self.algorithm.correction is Correction.auto else self.algorithm.correction

    @property
    def device_count(self) -> int:
        """Devices of the run; servers of `rollout.urls` and `teacher.urls` take none."""
        placement = self.placement
        separate = not placement.colocated and not self.rollout.urls
        return placement.trainer_ranks + (placement.engine_devices if separate else 0) + self.teacher_devices

    @property
    def teacher_devices(self) -> int:
        """Devices of the teacher that the run starts; 0 without one. Evaluations are not scored by it."""
        scores = self.teacher.path is not None and self.mode not in (Mode.eval, Mode.parity)
        return self.teacher.devices if scores else 0

    @property
    def serves_adapters(self) -> bool:
        """Whether the engines serve adapters. An evaluation runs on a whole model, into which they are merged."""
        return self.model.lora.enabled and self.mode is not Mode.eval

    def validate(self) -> None:
        check_bounds(self)
        sections = (self.model, self.data, self.reward, self.environment, self.algorithm, self.placement, self.rollout)
        for section in (*sections, self.eval, self.tracking):
            section.validate()
        kind = self.device.kind
        check_engine_flags("device.engine_args", self.device.engine_args)
        check_engine_flags("rollout.engine_args", self.rollout.engine_args)
        sources = list(self.data.train_sets) or [self.data.name]
        self.teacher.validate(self.rollout.temperature, sources=sources, policy=self.model)
        if self.model.lora.enabled:
            self.weight_sync.validate_for_adapters()
        releases = self.placement.colocated and self.offload.engine and kind is not DeviceKind.cpu
        self.weight_sync.validate(
            dtype_bytes=self.device.dtype.bytes, starts_engines=not self.rollout.urls, engines_keep_weights=not releases
        )
        transport_of(self.weight_sync, shared_devices=self.shared_devices, device=kind)

        if self.mode is Mode.sft:
            self._validate_demonstrations()
        self._validate_devices()
        self._validate_drafts()
        self._validate_tasks()
        self._validate_rewards()

    def _validate_demonstrations(self) -> None:
        imitated, weight = self.data.demonstrations, self.algorithm.ce_coefficient
        expect(self.placement.colocated, "placement", self.placement.kind, "colocate with mode=sft")
        staleness = self.placement.max_staleness
        expect(staleness == 0, "placement.max_staleness", staleness, "0 with mode=sft, which samples nothing")
        expect(not self.environment.multi_turn, "environment", self.environment.choice, "single_turn with mode=sft")
        expect(imitated is None, "data.demonstrations", imitated, "null with mode=sft, which imitates data.path")
        expect(weight == 1, "algorithm.ce_coefficient", weight, "1 with mode=sft, whose loss has no other component")
        for key, value in (("teacher.path", self.teacher.path), ("teacher.urls", self.teacher.urls or None)):
            expect(value is None, key, value, "null with mode=sft, which samples nothing")
        kl = self.algorithm.kl
        expect(not self.algorithm.needs_reference, "algorithm.kl", kl, "none with mode=sft, which samples nothing")

    def _validate_devices(self) -> None:
        devices, width = self.placement.engine_devices, self.rollout.tensor_parallel
        key = "placement.devices" if self.placement.colocated else "placement.rollout_devices"
        accepted = f"a divisor of {key}={devices}, such as {math.gcd(devices, width)}"
        starts_engines = self.evaluates and not self.rollout.urls
        expect(devices % width == 0 or not starts_engines, "rollout.tensor_parallel", width, accepted)
        ranks, replicas = self.placement.trainer_ranks, self.trainer.replicas
        accepted = f"a divisor of the trainer's {ranks} ranks, such as {math.gcd(ranks, replicas)}"
        expect(ranks % replicas == 0, "trainer.replicas", replicas, accepted)

        accepted = "auto or off, but with placement=fully_async and algorithm.updates_per_step=1"
        possible = self.stream or self.placement.stream is not Stream.on
        expect(possible, "placement.stream", self.placement.stream, accepted)
        for key in self.stop.given:
            expect(self.eval.every > 0, "eval.every", 0, f"the steps between evaluations, which {key} compares")

    def _validate_drafts(self) -> None:
        """Refuse drafts where SGLang would sample from another policy, or load them with the policy's weights.

        Sources below sglang/srt: speculative/eagle_utils.py (`_verify_uses_greedy`), managers/schedule_batch.py
        (`is_prefill_only`), managers/scheduler_components/weight_updater.py (`update_weights_from_disk`).
        """
        key, draft = "rollout.speculative", self.rollout.speculative
        on_cpu, verifies = self.device.kind is DeviceKind.cpu, self.weight_sync.verify is not Verify.never
        refused = [
            (on_cpu, "with device=cpu, where SGLang accepts the likeliest token at every temperature"),
            (bool(self.rollout.urls), "with rollout.urls, whose servers draft as they were started"),
            (self.model.lora.enabled, "with model.lora.rank, whose adapters a draft would not follow"),
            (verifies, "with weight_sync.verify, which loads the policy's export into the draft as well"),
        ]
        for applies, why in refused:
            expect(not applies or not self.rollout.drafts, key, draft, f"{NO_DRAFTS} {why}")
        expect(draft in (NO_DRAFTS, OWN_HEAD) or Path(draft).expanduser().is_dir(), key, draft, DRAFTS)

    def _validate_tasks(self) -> None:
        data, choice, turns = self.data, self.environment.choice, self.environment.multi_turn
        expect(data.tools is None or not turns, "data.tools", data.tools, f"null with {choice}, which names the tools")

        lists = self.environment.kind is EnvironmentKind.verifiers  # the tasks of the run
        accepted = f"{'environment' if lists else 'that of other rows'} with {choice}"
        expect(data.from_environment is lists, "data.name", data.name, accepted)
        expect(not lists or data.eval_path is None, "data.eval_path", data.eval_path, f"null with {choice}")
        expect(not lists or not data.eval_sets, "data.eval_sets", list(data.eval_sets), f"{{}} with {choice}")

    def _validate_rewards(self) -> None:
        path = self.model.lora.path
        merged = path is None or self.mode is not Mode.eval or self.resume != "never"
        expect(merged, "model.lora.path", path, "null with mode=eval: evaluate what mode=export merges")

        terms = self.reward.terms()
        compares = next((name for name, term in terms.items() if term.target is None and name in COMPARING), None)
        # the answer is the reply of a demonstration; without rewards there need be none
        unneeded = self.mode is Mode.sft or self.algorithm.reward_coefficient == 0
        accepted = f"a field of the rows with reward={compares}, which compares with it; or a reward of your own"
        expect(compares is None or self.data.answer is not None or unneeded, "data.answer", None, accepted)
        negative = any(term.weight < 0 for term in terms.values())
        accepted = "another one with a negative weight in reward.components: it needs rewards of at least 0"
        expect(self.algorithm.advantage != "maxrl" or not negative, "algorithm.advantage", "maxrl", accepted)
        scored = self.environment.scores or "environment" not in self.reward.components
        accepted = f"another reward with {self.environment.choice}, which has no score of its own"
        expect(scored, "reward", "environment", accepted)


SECTIONS = tuple(each.name for each in fields(RunConfig) if is_dataclass(each.type))

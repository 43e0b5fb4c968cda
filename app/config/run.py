"""The configuration of a run: one dataclass per group, and the rules that no single group can check."""

from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from pathlib import Path

from app.config.algorithm import AlgorithmConfig, Correction, OldPolicy
from app.config.algorithm import validate as validate_algorithm
from app.config.checkpoint import CheckpointConfig
from app.config.checkpoint import validate as validate_checkpoint
from app.config.cluster import ClusterConfig
from app.config.cluster import validate as validate_cluster
from app.config.data import DataConfig
from app.config.data import validate as validate_data
from app.config.device import DeviceConfig, DeviceKind
from app.config.device import validate as validate_device
from app.config.eval import EvalConfig
from app.config.eval import validate as validate_eval
from app.config.model import ModelConfig
from app.config.model import validate as validate_model
from app.config.offload import OffloadConfig
from app.config.placement import PlacementConfig, PlacementKind, Stream
from app.config.placement import validate as validate_placement
from app.config.recovery import RecoveryConfig
from app.config.recovery import validate as validate_recovery
from app.config.reward import RewardConfig
from app.config.reward import validate as validate_reward
from app.config.rollout import RolloutConfig
from app.config.rollout import validate as validate_rollout
from app.config.tracking import TrackingConfig
from app.config.tracking import validate as validate_tracking
from app.config.trainer import TrainerConfig
from app.config.trainer import validate as validate_trainer
from app.config.weight_sync import WeightSyncConfig, transport_of, validate_mode
from app.config.weight_sync import validate as validate_weight_sync
from app.errors import expect

SEED_LIMIT = 2**31


class Mode(Enum):
    train = "train"
    eval = "eval"
    plan = "plan"
    doctor = "doctor"
    parity = "parity"
    export = "export"
    report = "report"


@dataclass
class RunConfig:
    mode: Mode = Mode.train
    seed: int = 0
    steps: int = 60
    resume: str = "never"  # auto: the run in this folder; a path: that run; never: refuse a used folder
    device: DeviceConfig = field(default_factory=DeviceConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def engines(self) -> int:
        return len(self.rollout.urls) or self.placement.engine_devices // self.rollout.tensor_parallel

    @property
    def shared_devices(self) -> bool:
        """Whether each engine rank stands on the card of a trainer rank."""
        return self.placement.kind is PlacementKind.colocate and not self.rollout.urls

    @property
    def stream(self) -> bool:
        """Whether groups are trained on as they arrive."""
        asynchronous = self.placement.kind is PlacementKind.fully_async
        possible = asynchronous and self.algorithm.updates_per_step == 1
        return possible and self.placement.stream is not Stream.off

    @property
    def correction(self) -> Correction:
        """The correction in force: `auto` resolved."""
        chosen = self.algorithm.correction
        if chosen is not Correction.auto:
            return chosen
        stale = self.placement.max_staleness > 0 and self.algorithm.old_policy is OldPolicy.trainer
        return Correction.tis if stale else Correction.none


SECTIONS = tuple(each.name for each in fields(RunConfig) if each.default_factory is not MISSING)


def validate(config: RunConfig) -> None:
    """Raise `ConfigError` with one sentence on the first setting that cannot be run."""
    expect(config.steps >= 1, "steps", config.steps, "a whole number of at least 1")
    expect(0 <= config.seed < SEED_LIMIT, "seed", config.seed, f"a whole number from 0 to {SEED_LIMIT - 1}")
    validate_device(config.device)
    validate_model(config.model)
    validate_data(config.data)
    validate_reward(config.reward)
    validate_algorithm(config.algorithm, max_completion_tokens=config.rollout.max_completion_tokens)
    validate_placement(config.placement)
    validate_eval(config.eval)
    validate_recovery(config.recovery)
    validate_cluster(config.cluster)
    validate_rollout(config.rollout)
    validate_trainer(config.trainer)
    validate_checkpoint(config.checkpoint)
    validate_weight_sync(config.weight_sync)
    validate_tracking(config.tracking)
    _validate_together(config)


def _validate_together(config: RunConfig) -> None:
    devices, width = config.placement.engine_devices, config.rollout.tensor_parallel
    key = "placement.devices" if config.placement.kind is PlacementKind.colocate else "placement.rollout_devices"
    expect(devices % width == 0, "rollout.tensor_parallel", width, f"a divisor of {key}={devices}")
    expect(
        config.placement.stream is not Stream.on or config.algorithm.updates_per_step == 1,
        "placement.stream",
        config.placement.stream,
        f"auto or off with algorithm.updates_per_step={config.algorithm.updates_per_step}",
    )
    expect(
        config.placement.stream is not Stream.on or config.stream,
        "placement.stream",
        config.placement.stream,
        "auto or off with placement=colocate",
    )
    transport_of(config.weight_sync, shared_devices=config.shared_devices)
    released = (
        config.placement.kind is PlacementKind.colocate
        and config.offload.engine
        and config.device.kind is not DeviceKind.cpu
    )
    validate_mode(
        config.weight_sync,
        item_bytes=config.device.dtype.bytes,
        own_engines=not config.rollout.urls,
        weights_stay=not released,
    )
    local = config.model.path
    if local is not None and (local.startswith((".", "/", "~")) and not Path(local).expanduser().is_dir()):
        expect(False, "model.path", local, "an existing directory of the Hugging Face form, or a hub id")

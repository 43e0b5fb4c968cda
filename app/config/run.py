"""The configuration of a run: one dataclass per group, and the rules that no single group can check."""

import difflib
import re
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.algorithm import schema as algorithm_schema
from app.data import schema as data_schema
from app.device import schema as device_schema
from app.errors import ConfigError, expect
from app.model import schema as model_schema
from app.offload import schema as offload_schema
from app.placement import schema as placement_schema
from app.reward import schema as reward_schema
from app.rollout import schema as rollout_schema
from app.tracking import schema as tracking_schema
from app.trainer import schema as trainer_schema
from app.weight_sync import schema as weight_sync_schema

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
    device: device_schema.DeviceConfig = field(default_factory=device_schema.DeviceConfig)
    model: model_schema.ModelConfig = field(default_factory=model_schema.ModelConfig)
    data: data_schema.DataConfig = field(default_factory=data_schema.DataConfig)
    reward: reward_schema.RewardConfig = field(default_factory=reward_schema.RewardConfig)
    algorithm: algorithm_schema.AlgorithmConfig = field(default_factory=algorithm_schema.AlgorithmConfig)
    placement: placement_schema.PlacementConfig = field(default_factory=placement_schema.PlacementConfig)
    rollout: rollout_schema.RolloutConfig = field(default_factory=rollout_schema.RolloutConfig)
    trainer: trainer_schema.TrainerConfig = field(default_factory=trainer_schema.TrainerConfig)
    weight_sync: weight_sync_schema.WeightSyncConfig = field(default_factory=weight_sync_schema.WeightSyncConfig)
    offload: offload_schema.OffloadConfig = field(default_factory=offload_schema.OffloadConfig)
    checkpoint: trainer_schema.CheckpointConfig = field(default_factory=trainer_schema.CheckpointConfig)
    profile: trainer_schema.ProfileConfig = field(default_factory=trainer_schema.ProfileConfig)
    eval: placement_schema.EvalConfig = field(default_factory=placement_schema.EvalConfig)
    recovery: placement_schema.RecoveryConfig = field(default_factory=placement_schema.RecoveryConfig)
    cluster: placement_schema.ClusterConfig = field(default_factory=placement_schema.ClusterConfig)
    tracking: tracking_schema.TrackingConfig = field(default_factory=tracking_schema.TrackingConfig)

    @property
    def engines(self) -> int:
        return len(self.rollout.urls) or self.placement.engine_devices // self.rollout.tensor_parallel

    @property
    def shared_devices(self) -> bool:
        """Whether each engine rank stands on the card of a trainer rank."""
        return self.placement.kind is placement_schema.PlacementKind.colocate and not self.rollout.urls

    @property
    def stream(self) -> bool:
        """Whether groups are trained on as they arrive."""
        asynchronous = self.placement.kind is placement_schema.PlacementKind.fully_async
        possible = asynchronous and self.algorithm.updates_per_step == 1
        return possible and self.placement.stream is not placement_schema.Stream.off

    @property
    def correction(self) -> algorithm_schema.Correction:
        """The correction in force: `auto` resolved."""
        chosen = self.algorithm.correction
        if chosen is not algorithm_schema.Correction.auto:
            return chosen
        stale = self.placement.max_staleness > 0 and self.algorithm.old_policy is algorithm_schema.OldPolicy.trainer
        return algorithm_schema.Correction.tis if stale else algorithm_schema.Correction.none


def register() -> None:
    """Make the schema known to Hydra, so that a misspelt key or a wrong type fails while composing."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)


def resolve(composed: DictConfig) -> RunConfig:
    """The typed configuration; a key that is not in the schema (also one added with `+`) is refused."""
    plain = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        typed = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.to_container(plain, resolve=True))
        config = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error
    assert isinstance(config, RunConfig)
    validate(config)
    return config


def sentence(error: Exception) -> str:
    """One line of a Hydra or OmegaConf error: the key, what is wrong with it, and what would be accepted."""
    lines = [line.strip() for line in str(error).splitlines()]
    cause = error.__cause__
    if cause is not None and lines and lines[0].startswith("Error merging override"):
        lines[0] = lines[0].removeprefix("Error merging override").strip() + " is not accepted:"
        lines += [line.strip() for line in str(cause).splitlines()]
    if choice := re.search(r"Could not find '(.+)/([^/]*)'", lines[0] if lines else ""):
        start = next((at for at, line in enumerate(lines) if line.startswith("Available options")), len(lines))
        options = ", ".join(line for line in lines[start + 1 :] if re.fullmatch(r"\w+", line))
        return f"{choice[1]}={choice[2]} is not accepted: give one of {options or 'none: there is no such group'}."
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    unknown = re.match(r"Could not override '([^']+)'", lines[0]) if lines else None
    if unknown or (lines and re.match(r"Key '.+' not in '", lines[0])):
        return _no_such_key(unknown.group(1) if unknown else key or lines[0].split("'")[1])
    noise = ("full_key:", "object_type=", "reference_type=", "Set the env", "Config search path", "provider=")
    told = " ".join(line for line in lines if line and not line.startswith(noise)).rstrip(".")
    told = told.removeprefix("In 'config': ")
    return f"{told}." if not key or key in told else f"{key}: {told}."


def _no_such_key(key: str) -> str:
    """Name the nearest settings, which is what a misspelling needs."""
    names = setting_names(RunConfig)
    near = difflib.get_close_matches(key, names, n=3) or [n for n in names if n.split(".")[-1] == key.split(".")[-1]]
    hint = f"did you mean {' or '.join(near)}?" if near else "--cfg job shows all settings."
    return f"{key} is not a setting or group: {hint}"


def setting_names(schema: type, prefix: str = "") -> list[str]:
    """The dotted names of all settings and groups."""
    names: list[str] = []
    for each in fields(schema):
        names.append(prefix + each.name)
        nested = each.default_factory() if each.default_factory is not MISSING else None
        if is_dataclass(nested) and not isinstance(nested, type):
            names += setting_names(type(nested), f"{prefix}{each.name}.")
    return names


def validate(config: RunConfig) -> None:
    """Raise `ConfigError` with one sentence on the first setting that cannot be run."""
    expect(config.steps >= 1, "steps", config.steps, "a whole number of at least 1")
    expect(0 <= config.seed < SEED_LIMIT, "seed", config.seed, f"a whole number from 0 to {SEED_LIMIT - 1}")
    device_schema.validate(config.device)
    model_schema.validate(config.model)
    data_schema.validate(config.data)
    reward_schema.validate(config.reward)
    algorithm_schema.validate(config.algorithm, max_completion_tokens=config.rollout.max_completion_tokens)
    placement_schema.validate(config.placement, config.eval, config.recovery, config.cluster)
    rollout_schema.validate(config.rollout)
    trainer_schema.validate(config.trainer, config.checkpoint)
    weight_sync_schema.validate(config.weight_sync)
    tracking_schema.validate(config.tracking)
    _validate_together(config)


def _validate_together(config: RunConfig) -> None:
    devices, width = config.placement.engine_devices, config.rollout.tensor_parallel
    key = (
        "placement.devices"
        if config.placement.kind is placement_schema.PlacementKind.colocate
        else "placement.rollout_devices"
    )
    expect(devices % width == 0, "rollout.tensor_parallel", width, f"a divisor of {key}={devices}")
    expect(
        config.placement.stream is not placement_schema.Stream.on or config.algorithm.updates_per_step == 1,
        "placement.stream",
        config.placement.stream,
        f"auto or off with algorithm.updates_per_step={config.algorithm.updates_per_step}",
    )
    expect(
        config.placement.stream is not placement_schema.Stream.on or config.stream,
        "placement.stream",
        config.placement.stream,
        "auto or off with placement=colocate",
    )
    weight_sync_schema.transport_of(config.weight_sync, shared_devices=config.shared_devices)
    released = (
        config.placement.kind is placement_schema.PlacementKind.colocate
        and config.offload.engine
        and config.device.kind is not device_schema.DeviceKind.cpu
    )
    weight_sync_schema.validate_mode(
        config.weight_sync,
        item_bytes=config.device.dtype.bytes,
        own_engines=not config.rollout.urls,
        weights_stay=not released,
    )
    local = config.model.path
    if local is not None and (local.startswith((".", "/", "~")) and not Path(local).expanduser().is_dir()):
        expect(False, "model.path", local, "an existing directory of the Hugging Face form, or a hub id")

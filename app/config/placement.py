"""Settings of `placement=`, `eval`, `recovery` and `cluster`."""

from dataclasses import dataclass
from enum import Enum

from app.errors import expect
from app.types import InFlight


class PlacementKind(Enum):
    colocate = "colocate"  # trainer and engines take turns on the same devices
    fully_async = "fully_async"  # they work at the same time on devices of their own


class Stream(Enum):
    auto = "auto"  # on where possible
    on = "on"  # groups are trained on as they arrive
    off = "off"  # a step begins when all its groups are there


@dataclass
class PlacementConfig:
    kind: PlacementKind = PlacementKind.colocate
    devices: int = 1  # colocate: shared by trainer ranks and engines
    trainer_devices: int = 1  # fully_async
    rollout_devices: int = 1  # fully_async
    max_staleness: int = 0  # pushes
    in_flight: InFlight = InFlight.drain
    stream: Stream = Stream.auto

    @property
    def trainer_ranks(self) -> int:
        return self.devices if self.kind is PlacementKind.colocate else self.trainer_devices

    @property
    def engine_devices(self) -> int:
        return self.devices if self.kind is PlacementKind.colocate else self.rollout_devices


@dataclass
class EvalConfig:
    every: int = 0  # steps; 0: only before (if set) and after
    before_train: bool = True
    samples: int = 1  # completions per prompt
    temperature: float = 0.0  # greedy
    top_p: float = 1.0


@dataclass
class RecoveryConfig:
    max_restarts: int = 3  # of the trainer, from its last checkpoint
    engine_failures: int = 5  # attempts of a prompt lost to engines, before the run stops
    data_failures: int = 2  # attempts of a prompt that fails by itself


@dataclass
class ClusterConfig:
    address: str | None = None  # a running Ray cluster; null starts one on this machine
    timeout_s: float = 120.0  # for the resources to appear


def validate(config: PlacementConfig, evaluation: EvalConfig, recovery: RecoveryConfig, cluster: ClusterConfig) -> None:
    name = "placement."
    for key in ("devices", "trainer_devices", "rollout_devices"):
        expect(getattr(config, key) >= 1, name + key, getattr(config, key), "a whole number of at least 1")
    expect(config.max_staleness >= 0, name + "max_staleness", config.max_staleness, "a whole number of at least 0")
    colocate = config.kind is PlacementKind.colocate
    expect(
        config.max_staleness == 0 or not colocate,
        name + "max_staleness",
        config.max_staleness,
        "0 with placement=colocate, which is always on-policy",
    )
    expect(
        config.in_flight is InFlight.drain or config.max_staleness > 0,
        name + "in_flight",
        config.in_flight,
        "drain with placement.max_staleness=0, which allows no completion to live through a push",
    )
    expect(evaluation.every >= 0, "eval.every", evaluation.every, "a whole number of at least 0")
    expect(evaluation.samples >= 1, "eval.samples", evaluation.samples, "a whole number of at least 1")
    expect(evaluation.temperature >= 0, "eval.temperature", evaluation.temperature, "a number of at least 0")
    expect(0 < evaluation.top_p <= 1, "eval.top_p", evaluation.top_p, "a number above 0 and up to 1")
    expect(
        evaluation.samples == 1 or evaluation.temperature > 0,
        "eval.samples",
        evaluation.samples,
        "1 with eval.temperature=0, since greedy samples are all the same",
    )
    for key in ("max_restarts", "engine_failures", "data_failures"):
        expect(getattr(recovery, key) >= 0, f"recovery.{key}", getattr(recovery, key), "a whole number of at least 0")
    expect(cluster.timeout_s > 0, "cluster.timeout_s", cluster.timeout_s, "a number of seconds above 0")

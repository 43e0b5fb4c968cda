"""Settings of `placement=`."""

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


def validate(config: PlacementConfig) -> None:
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

"""Settings of `placement=`."""

from dataclasses import dataclass
from enum import Enum

from app.config.setting import setting
from app.errors import expect
from app.types import InFlight


class PlacementKind(Enum):
    """How trainer and engines share the devices."""

    colocate = "colocate"
    fully_async = "fully_async"


class Stream(Enum):
    """Whether training of a step begins before all of its groups are there."""

    auto = "auto"
    on = "on"
    off = "off"


@dataclass
class PlacementConfig:
    """The schedule, its devices, and how stale a trajectory may get."""

    kind: PlacementKind = setting(
        PlacementKind.colocate, "Trainer and engines alternate on shared devices, or run concurrently on their own."
    )
    devices: int = setting(1, "Devices shared by trainer ranks and engines (colocate).", at_least=1)
    trainer_devices: int = setting(1, "Devices of the trainer, one rank each (fully_async).", at_least=1)
    rollout_devices: int = setting(1, "Devices of the engines (fully_async).", at_least=1)
    max_staleness: int = setting(
        0, "Hard bound on the staleness of a trajectory, in weight syncs; 0 trains on-policy.", at_least=0
    )
    in_flight: InFlight = setting(
        InFlight.drain,
        "Requests in flight at a weight sync: drain finishes them first, retract continues them with a recomputed KV "
        "cache, in_place continues them on the old one.",
    )
    stream: Stream = setting(
        Stream.auto, "Train on groups as they arrive; auto is on in fully_async with one update per step."
    )

    @property
    def trainer_ranks(self) -> int:
        return self.devices if self.kind is PlacementKind.colocate else self.trainer_devices

    @property
    def engine_devices(self) -> int:
        return self.devices if self.kind is PlacementKind.colocate else self.rollout_devices

    def validate(self) -> None:
        fresh = self.max_staleness == 0
        accepted = "0 with placement=colocate, which is always on-policy"
        possible = fresh or self.kind is not PlacementKind.colocate
        expect(possible, "placement.max_staleness", self.max_staleness, accepted)
        accepted = "drain with placement.max_staleness=0: no completion may continue across a weight sync"
        expect(self.in_flight is InFlight.drain or not fresh, "placement.in_flight", self.in_flight, accepted)

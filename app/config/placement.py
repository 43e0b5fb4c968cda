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
    in_flight: InFlight | None = setting(
        None,
        "Requests in flight at a weight sync: drain finishes them first, retract continues them with a recomputed KV "
        "cache, in_place continues them on the old one; null is drain on-policy, retract in colocate and with linear "
        "attention, else in_place.",
    )
    stream: Stream = setting(
        Stream.auto, "Train on groups as they arrive; auto is on in fully_async with one update per step."
    )

    @property
    def colocated(self) -> bool:
        return self.kind is PlacementKind.colocate

    @property
    def trainer_ranks(self) -> int:
        return self.devices if self.colocated else self.trainer_devices

    @property
    def engine_devices(self) -> int:
        return self.devices if self.colocated else self.rollout_devices

    def in_flight_or_default(self, *, keeps_cache: bool = False) -> InFlight:
        """Return what happens to requests in flight at a sync.

        Args:
            keeps_cache: The state of a request is a KV cache alone, in which every token keeps the entries of the
                policy that sampled it. A recurrent state mixes old and new weights from the first token on.
        """
        if self.in_flight is not None:
            return self.in_flight
        if self.max_staleness == 0:
            return InFlight.drain
        return InFlight.in_place if keeps_cache and not self.colocated else InFlight.retract

    def validate(self) -> None:
        in_flight = self.in_flight_or_default()
        if self.max_staleness == 0:
            accepted = "drain with placement.max_staleness=0: no completion may continue across a weight sync"
            expect(in_flight is InFlight.drain, "placement.in_flight", in_flight, accepted)
        elif self.colocated:
            accepted = "retract with placement=colocate, whose engines release their KV cache while the trainer trains"
            expect(in_flight is InFlight.retract, "placement.in_flight", in_flight, accepted)

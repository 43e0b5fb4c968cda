"""Who needs how much memory on a device, in which phase of a run, and which phase is the tightest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.config import RunConfig
from app.config.device import DeviceKind
from app.config.placement import PlacementKind
from app.device import Device
from app.mode.plan.engine_memory import EngineMemoryPlan
from app.mode.plan.trainer_memory import GIB, Items, TrainerMemoryPlan
from app.model.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of one device."""

    bytes: float
    source: str  # where the number comes from


@dataclass(frozen=True, slots=True)
class Phase:
    """One device at one time."""

    device: str  # "trainer device", "engine device" or "shared device"
    name: str
    items: Items  # bytes

    @property
    def bytes(self) -> float:
        return sum(self.items.values())


def capacity(config: RunConfig, device: Device) -> Capacity:
    """From the configuration, else from the device, else a usual card's, which is said."""
    if config.device.memory_gib is not None:
        return Capacity(config.device.memory_gib * GIB, "device.memory_gib")
    asked = device.memory_gib()
    if device.kind is DeviceKind.cpu and asked is not None:
        sharing = devices(config)
        return Capacity(asked * GIB / sharing, f"{asked:.1f} GiB of this machine for {sharing} device(s)")
    if asked is not None:
        return Capacity(asked * GIB, "this machine's device")
    return Capacity((device.card_memory_gib or 0.0) * GIB, f"assumed: {device.card}; device.memory_gib=... says yours")


def devices(config: RunConfig) -> int:
    """How many devices the run takes; engines that run already take none."""
    placement = config.placement
    shared = placement.kind is PlacementKind.colocate or bool(config.rollout.urls)
    return placement.trainer_ranks + (0 if shared else placement.engine_devices)


def phases(config: RunConfig, device: Device, trainer: TrainerMemoryPlan, engine: EngineMemoryPlan) -> list[Phase]:
    """All phases of all kinds of devices, in the order of a step."""
    if config.rollout.urls:
        return list(_trainer_alone(trainer))
    if config.placement.kind is PlacementKind.colocate:
        return list(_shared(config, device, trainer, engine))
    return [*_trainer_alone(trainer), *_engine_alone(trainer, engine)]


def tightest(found: list[Phase]) -> Phase:
    return max(found, key=lambda phase: phase.bytes)


def of(
    config: RunConfig, device: Device, model: Architecture, flags: Mapping[str, object]
) -> tuple[Capacity, TrainerMemoryPlan, EngineMemoryPlan]:
    room = capacity(config, device)
    return room, TrainerMemoryPlan(config, device, model), EngineMemoryPlan(config, device, model, flags, room.bytes)


def _trainer_alone(trainer: TrainerMemoryPlan) -> Iterator[Phase]:
    always = {**trainer.offloadable(), **trainer.staying()}
    for name, added in trainer.moments():
        yield Phase("trainer device", name, {**always, **added})
    yield Phase("trainer device", "push", {**always, **trainer.gathering()})


def _engine_alone(trainer: TrainerMemoryPlan, engine: EngineMemoryPlan) -> Iterator[Phase]:
    yield Phase("engine device", "generate", engine.serving())
    pushed = {**engine.receiving(trainer.bucket), **engine.caches()}  # the cache stays while weights arrive
    yield Phase("engine device", "push", pushed)


def _shared(config: RunConfig, device: Device, trainer: TrainerMemoryPlan, engine: EngineMemoryPlan) -> Iterator[Phase]:
    """colocate: what each side leaves on the device while the other works."""
    offload_trainer = config.offload.trainer and device.shares_memory
    engine_leaves = config.offload.engine and device.shares_memory
    resting_trainer = {**({} if offload_trainer else trainer.offloadable()), **trainer.staying()}
    resting_engine = engine.staying() if engine_leaves else engine.serving()
    yield Phase("shared device", "generate", {**resting_trainer, **engine.serving()})
    for name, added in trainer.moments():
        mine = {**trainer.offloadable(), **trainer.staying(), **added}
        yield Phase("shared device", name, {**mine, **resting_engine})
    pushing = trainer.offloadable()
    if offload_trainer:
        pushing = {"masters": pushing["masters"]}
    caches = {} if engine_leaves else engine.caches()
    sending = {**pushing, **trainer.staying(), **trainer.gathering()}
    yield Phase("shared device", "push", {**sending, **engine.receiving(trainer.bucket), **caches})

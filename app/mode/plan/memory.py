"""Memory of a device in every phase of a run, and the peak phase."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.config import RunConfig
from app.config.device import DeviceKind
from app.config.placement import PlacementKind
from app.device import Device
from app.mode.plan.engine_memory import EngineMemoryPlan, plan_engine
from app.mode.plan.trainer_memory import Items, TrainerMemoryPlan, plan_trainer
from app.model.architecture import Architecture
from app.utils.units import GIB


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of one device."""

    bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory use of one device in one phase of a step."""

    device: str  # "trainer device", "engine device" or "shared device"
    name: str
    items: Items

    @property
    def bytes(self) -> float:
        """Sum of the items."""
        return sum(self.items.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All phases of all kinds of devices, in the order of a step."""

    capacity: Capacity
    engine: EngineMemoryPlan
    phases: list[Phase]

    @property
    def peak_phase(self) -> Phase:
        """The phase that uses the most memory."""
        return max(self.phases, key=lambda phase: phase.bytes)


def plan_memory(config: RunConfig, device: Device, model: Architecture, flags: Mapping[str, object]) -> MemoryPlan:
    """Plan the memory of a run whose engines start with these SGLang flags."""
    limit = capacity(config, device)
    trainer = plan_trainer(config, device, model)
    engine = plan_engine(config, device, model, flags, limit.bytes)

    if config.rollout.urls:
        phases = _trainer_phases(trainer)
    elif config.placement.kind is PlacementKind.colocate:
        phases = _shared_phases(config, device, trainer, engine)
    else:
        phases = [*_trainer_phases(trainer), *_engine_phases(trainer, engine)]
    return MemoryPlan(limit, engine, phases)


def capacity(config: RunConfig, device: Device) -> Capacity:
    """Return the memory of a device: as configured, else as the machine reports, else that of a common card."""
    if config.device.memory_gib is not None:
        return Capacity(config.device.memory_gib * GIB, "device.memory_gib")

    reported = device.memory_gib()
    if reported is None:
        return Capacity((device.card_memory_gib or 0.0) * GIB, f"assumed: {device.card}; override: device.memory_gib")
    if device.kind is DeviceKind.cpu:
        sharing = config.device_count
        return Capacity(reported * GIB / sharing, f"{reported:.1f} GiB of this machine for {sharing} device(s)")
    return Capacity(reported * GIB, "this machine's device")


def _trainer_phases(trainer: TrainerMemoryPlan) -> list[Phase]:
    base = {**trainer.offloadable, **trainer.resident}
    added = {**trainer.peaks, "sync": trainer.syncing}
    return [Phase("trainer device", name, {**base, **items}) for name, items in added.items()]


def _engine_phases(trainer: TrainerMemoryPlan, engine: EngineMemoryPlan) -> list[Phase]:
    syncing = {**engine.syncing(trainer.bucket), **engine.caches}  # the caches stay during a sync
    return [Phase("engine device", "generate", engine.generating), Phase("engine device", "sync", syncing)]


def _shared_phases(
    config: RunConfig, device: Device, trainer: TrainerMemoryPlan, engine: EngineMemoryPlan
) -> list[Phase]:
    """Plan colocate, where either side may be offloaded while the other works."""
    state = trainer.offloadable
    idle_trainer = state
    syncing_trainer = state
    if config.offload.trainer and device.shares_memory:
        idle_trainer = {}
        syncing_trainer = trainer.parameters

    idle_engine = engine.generating
    syncing_engine = {**engine.syncing(trainer.bucket), **engine.caches}
    if config.offload.engine and device.shares_memory:
        idle_engine = {**engine.kept, **engine.resident}
        syncing_engine = engine.syncing(trainer.bucket)

    phases = {
        "generate": {**idle_trainer, **engine.generating},
        **{name: {**state, **items, **idle_engine} for name, items in trainer.peaks.items()},
        "sync": {**syncing_trainer, **trainer.syncing, **syncing_engine},
    }
    return [Phase("shared device", name, {**trainer.resident, **items}) for name, items in phases.items()]

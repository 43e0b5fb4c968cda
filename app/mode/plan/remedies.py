"""What makes a plan fit that does not: changes of the configuration, each planned again."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from app.config import RunConfig
from app.config.model import LORA_RATE
from app.config.placement import PlacementKind
from app.config.trainer import Checkpointing
from app.device import Device
from app.errors import ConfigError, yaml_text
from app.mode.plan.memory import MemoryPlan, plan_memory
from app.model.architecture import QWEN3_06B, QWEN3_17B, Architecture
from app.rollout.engine.server_args import engine_flags, memory_fraction
from app.utils.units import GIB

SMALLER = {"Qwen/Qwen3-1.7B": QWEN3_17B, "Qwen/Qwen3-0.6B": QWEN3_06B}
LOWER_FRACTION = 0.5  # of rollout.memory_fraction, where trainer and engine share a device
SHORTEST = 1024  # completion tokens; below, a shorter limit is no remedy
SMALLEST_GAIN = 0.01  # of the peak
FACTORS = (2, 4, 8)  # more devices
LORA_RANK = 32


@dataclass(frozen=True, slots=True)
class Change:
    """One remedy: settings to change, or a smaller model to train."""

    settings: Mapping[str, object] = field(default_factory=dict)  # dotted key → value
    model: str | None = None  # id of a smaller model

    def __str__(self) -> str:
        if self.model is not None:
            return f"model=hf model.path={self.model}"
        return " ".join(f"{key}={yaml_text(value)}" for key, value in self.settings.items())


def remedies_of(config: RunConfig, device: Device, model: Architecture) -> list[list[str]]:
    """Return a section of the plan with what to try, if the run does not fit; else nothing."""
    plan = _plan(config, device, model)
    if _fits(config, plan):
        return []

    lines = ["To make it fit, try one or several of"]
    for change in _changes(config, device, model):
        changed = _changed(config, change)
        if not _is_accepted(changed):
            continue

        replanned = _plan(changed, device, SMALLER.get(change.model or "", model))
        if _better(plan, replanned):
            verdict = "fits" if _fits(changed, replanned) else "does not fit alone"
            lines.append(f"  {change}: peak {replanned.peak_phase.bytes / GIB:.2f} GiB, {verdict}")
    return [lines] if len(lines) > 1 else []


def _changes(config: RunConfig, device: Device, model: Architecture) -> Iterator[Change]:
    """Yield changes from the cheapest to those that need other hardware or another model."""
    placement = config.placement
    rollout = config.rollout
    colocated = placement.kind is PlacementKind.colocate

    if config.trainer.activation_checkpointing is not Checkpointing.all:
        yield Change({"trainer.activation_checkpointing": Checkpointing.all})
    if colocated and device.shares_memory and not (config.offload.engine and config.offload.trainer):
        yield Change({"offload.engine": True, "offload.trainer": True})

    if config.trainer.tokens_per_microbatch > rollout.max_tokens:
        yield Change({"trainer.tokens_per_microbatch": rollout.max_tokens})
    shorter = rollout.max_completion_tokens // 2
    if shorter >= SHORTEST:
        yield Change(
            {
                "rollout.max_completion_tokens": shorter,
                "trainer.tokens_per_microbatch": rollout.max_prompt_tokens + shorter,
            }
        )
    if colocated and memory_fraction(config, device) > LOWER_FRACTION:
        yield Change({"rollout.memory_fraction": LOWER_FRACTION})

    if not config.model.lora.enabled:
        yield Change({"model.lora.rank": LORA_RANK, "trainer.lr": float(f"{LORA_RATE * config.trainer.lr:.3g}")})

    yield _more_devices(config, device, model)
    if config.teacher_devices:
        lower = {**config.teacher.engine_args, "mem-fraction-static": LOWER_FRACTION}
        yield Change({"teacher.engine_args": lower})
        yield Change({"teacher.devices": 2 * config.teacher.devices, "teacher.engine_args": lower})

    for name, smaller in SMALLER.items():
        if smaller.parameters < model.parameters:
            yield Change(model=name)


def _more_devices(config: RunConfig, device: Device, model: Architecture) -> Change:
    """Return the smallest multiple of the devices that fits, or the largest one tried.

    The shards of the trainer get smaller; wider engines are only for weights that leave no room for caches.
    """
    colocated = config.placement.kind is PlacementKind.colocate
    change = Change()
    for factor in FACTORS:
        devices: dict[str, object] = {"placement.trainer_devices": factor * config.placement.trainer_devices}
        if colocated:
            devices = {"placement.devices": factor * config.placement.devices}

        if _plan(config, device, model).engine.cache_bytes <= 0:
            if not colocated:
                devices["placement.rollout_devices"] = factor * config.placement.rollout_devices
            devices["rollout.tensor_parallel"] = factor * config.rollout.tensor_parallel

        change = Change(devices)
        changed = _changed(config, change)
        if _fits(changed, _plan(changed, device, model)):
            break
    return change


def _better(plan: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether the other plan needs less memory, or has room for caches where this one has none."""
    less = other.peak_phase.bytes <= (1 - SMALLEST_GAIN) * plan.peak_phase.bytes
    scores = other.teacher_fits and not plan.teacher_fits
    return less or scores or plan.engine.cache_bytes <= 0 < other.engine.cache_bytes


def _changed(config: RunConfig, change: Change) -> RunConfig:
    changed = copy.deepcopy(config)
    for key, value in change.settings.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(changed), name, value)
    return changed


def _is_accepted(config: RunConfig) -> bool:
    try:
        config.validate()
    except ConfigError:
        return False
    return True


def _plan(config: RunConfig, device: Device, model: Architecture) -> MemoryPlan:
    return plan_memory(config, device, model, engine_flags(config, device))


def _fits(config: RunConfig, plan: MemoryPlan) -> bool:
    room = bool(config.rollout.urls) or plan.engine.cache_bytes > 0
    return room and plan.teacher_fits and plan.peak_phase.bytes <= plan.capacity.bytes

"""Suggested changes of the configuration when memory does not fit, each planned again."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import attrgetter

from app.config import RunConfig
from app.config.model import LORA_RATE
from app.config.trainer import Checkpointing
from app.device import Device
from app.errors import ConfigError, yaml_text
from app.mode.plan.duration import step_seconds
from app.mode.plan.memory import MemoryPlan, plan_memory
from app.model.architecture import QWEN3_06B, QWEN3_17B, Architecture
from app.rollout.engine.server_args import memory_fraction
from app.utils.units import GIB

SMALLER = {"Qwen/Qwen3-1.7B": QWEN3_17B, "Qwen/Qwen3-0.6B": QWEN3_06B}
LOWER_FRACTION = 0.5  # of rollout.memory_fraction, where trainer and engine share a device
SHORTEST = 1024  # completion tokens; below, a shorter limit is no remedy
SMALLEST_GAIN = 0.01  # of the peak
FACTORS = (2, 4, 8)  # more devices
LORA_RANK = 32
SPLITS_SHOWN = 5

Change = Mapping[str, object]  # setting → value


def remedies_of(config: RunConfig, device: Device, model: Architecture) -> list[str]:
    """Return a section of the plan with what to try, if the run does not fit; else nothing."""
    plan = plan_memory(config, device, model)
    if _fits(config, plan):
        return []

    lines = ["To make it fit, try one or several of"]
    for change, changed_model in _changes(config, device, model):
        changed = _changed(config, change)
        try:
            changed.validate()
        except ConfigError:
            continue

        replanned = plan_memory(changed, device, changed_model)
        if _better(plan, replanned):
            settings = " ".join(f"{key}={yaml_text(value)}" for key, value in change.items())
            verdict = "fits" if _fits(changed, replanned) else "does not fit alone"
            lines.append(f"  {settings}: peak {replanned.peak_phase.bytes / GIB:.2f} GiB, {verdict}")
    return lines if len(lines) > 1 else []


def splits_of(config: RunConfig, device: Device, model: Architecture) -> list[str]:
    """Return a section of the plan with the step times of other splits of the run's devices, the best one marked."""
    placement = config.placement
    if placement.colocated or config.rollout.urls:
        return []

    total, now = placement.trainer_devices + placement.rollout_devices, placement.trainer_devices
    found: dict[int, float] = {}  # devices of the trainer → seconds of a step
    lines: dict[int, str] = {}
    for trainers in range(1, total):
        changed = _changed(
            config, {"placement.trainer_devices": trainers, "placement.rollout_devices": total - trainers}
        )
        with suppress(ConfigError):
            changed.validate()
            plan = plan_memory(changed, device, model)
            seconds = step_seconds(changed, device, model, plan.engine)
            if seconds is not None:
                fits = _fits(changed, plan)
                found |= {trainers: seconds.total} if fits else {}
                lines[trainers] = (
                    f"  {trainers} + {total - trainers}: generate {seconds.generate:.0f} s, train {seconds.train:.0f} "
                    f"s, a step {seconds.total:.0f} s{'' if fits else ', DOES NOT FIT'}"
                )
    if len(lines) < 2 or not found:
        return []
    best = min(found, key=lambda trainers: found[trainers])
    lines[best] += "  (the best)"
    shown = sorted(lines, key=lambda trainers: (trainers not in (now, best), abs(trainers - best)))[:SPLITS_SHOWN]
    return ["Devices of trainer + engines, at full length", *(lines[trainers] for trainers in sorted(shown))]


def _changes(config: RunConfig, device: Device, model: Architecture) -> Iterator[tuple[Change, Architecture]]:
    """Yield changes and the model that they train, from the cheapest to those that need other hardware or models."""
    rollout = config.rollout
    colocated = config.placement.colocated

    changes: list[Change] = []
    if config.trainer.activation_checkpointing not in (Checkpointing.all, Checkpointing.auto):
        changes.append({"trainer.activation_checkpointing": Checkpointing.all})
    if colocated and device.shares_memory and not (config.offload.engine and config.offload.trainer):
        changes.append({"offload.engine": True, "offload.trainer": True})

    if config.trainer.tokens_per_microbatch > rollout.max_tokens:
        changes.append({"trainer.tokens_per_microbatch": rollout.max_tokens})
    shorter = rollout.max_completion_tokens // 2
    if shorter >= SHORTEST:
        microbatch = rollout.max_prompt_tokens + shorter
        changes.append({"rollout.max_completion_tokens": shorter, "trainer.tokens_per_microbatch": microbatch})
    if colocated and memory_fraction(config, device) > LOWER_FRACTION:
        changes.append({"rollout.memory_fraction": LOWER_FRACTION})

    if not config.model.lora.enabled:
        rate = float(f"{LORA_RATE * config.trainer.lr:.3g}")
        changes.append({"model.lora.rank": LORA_RANK, "trainer.lr": rate})

    changes.append(_more_devices(config, device, model))
    if config.teacher_devices:
        lower = {**config.teacher.engine_args, "mem-fraction-static": LOWER_FRACTION}
        changes.append({"teacher.engine_args": lower})
        changes.append({"teacher.devices": 2 * config.teacher.devices, "teacher.engine_args": lower})

    yield from ((change, model) for change in changes)
    for path, smaller in SMALLER.items():
        if smaller.parameters < model.parameters:
            yield {"model": "hf", "model.path": path}, smaller


def _more_devices(config: RunConfig, device: Device, model: Architecture) -> Change:
    """Return the smallest multiple of the devices that fits, or the largest one tried.

    The shards of the trainer get smaller; wider engines are only for weights that leave no room for caches.
    """
    colocated = config.placement.colocated
    keys = ["placement.devices" if colocated else "placement.trainer_devices"]
    wider = config.engines > 0 and plan_memory(config, device, model).engine.cache_bytes <= 0
    if wider and not colocated:
        keys.append("placement.rollout_devices")
    if wider:
        keys.append("rollout.tensor_parallel")

    for factor in FACTORS:
        change = {key: factor * attrgetter(key)(config) for key in keys}
        changed = _changed(config, change)
        if _fits(changed, plan_memory(changed, device, model)):
            break
    return change


def _better(plan: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether the other plan needs less memory, or has room for caches where this one has none."""
    less = other.peak_phase.bytes <= (1 - SMALLEST_GAIN) * plan.peak_phase.bytes
    scores = other.teacher_fits and not plan.teacher_fits
    return less or scores or plan.engine.cache_bytes <= 0 < other.engine.cache_bytes


def _changed(config: RunConfig, change: Change) -> RunConfig:
    changed = copy.deepcopy(config)
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        if section:  # a preset's shapes are those of the model beside it
            setattr(attrgetter(section)(changed), name, value)
    return changed


def _fits(config: RunConfig, plan: MemoryPlan) -> bool:
    room = not config.engines or bool(config.rollout.urls) or plan.engine.cache_bytes > 0
    return room and plan.teacher_fits and plan.peak_phase.bytes <= plan.capacity.bytes

"""The memory, engine and push sections of the plan, as text."""

import math
import shlex
from collections.abc import Mapping

from app.config import RunConfig
from app.config.weight_sync import SnapshotPlace, SyncMode
from app.device import Device
from app.mode.plan.engine_memory import CONV_BYTES, EngineMemoryPlan
from app.mode.plan.memory import Capacity, Phase, of, phases, tightest
from app.mode.plan.trainer_memory import GIB, MIB
from app.model.architecture import Architecture

SHOWN = 4  # the largest items of a phase
BACKWARD_FLOPS, RECOMPUTED_FLOPS = 6, 8  # per parameter and token
SHORTEST_TOLD = 1.0  # seconds; below, starting and answering take longer than the wire
UTILISATION = 0.4  # of the peak, as a well-fed trainer reaches it


def memory(config: RunConfig, device: Device, model: Architecture, flags: Mapping[str, object]) -> list[str]:
    """A line a phase, and the tightest one named with what it leaves."""
    room, trainer, engine = of(config, device, model, flags)
    found = phases(config, device, trainer, engine)
    lines = [f"Memory of a device: {room.bytes / GIB:.1f} GiB ({room.source}); activations are estimates"]
    width = max(len(phase.name) for phase in found)
    for phase in found:
        lines.append(f"  {phase.device:<14}  {phase.name:<{width}}  {_gib(phase.bytes):>9}  = {_items(phase)}")
    return [*lines, _verdict(tightest(found), room), *_cache(config, engine)]


def _verdict(worst: Phase, room: Capacity) -> str:
    left = room.bytes - worst.bytes
    told = f"{_gib(left)} left" if left >= 0 else f"DOES NOT FIT: {_gib(-left)} too much"
    return f"  tightest: {worst.device}, {worst.name}: {_gib(worst.bytes)} of {_gib(room.bytes)}, {told}"


def _items(phase: Phase) -> str:
    largest = sorted(phase.items.items(), key=lambda item: -item[1])
    told = [f"{name} {value / GIB:.2f}" for name, value in largest[:SHOWN] if value >= 0.005 * GIB]
    rest = sum(value for _, value in largest[SHOWN:])
    return " + ".join([*told, *([f"other {rest / GIB:.2f}"] if rest >= 0.005 * GIB else [])]) or "nothing to speak of"


def _cache(config: RunConfig, engine: EngineMemoryPlan) -> list[str]:
    """What the engines can hold at once, against what the run asks of them."""
    if config.rollout.urls:
        return ["  caches: as the running servers were started"]
    if engine.rest <= 0:
        return [
            f"  caches: NO ROOM: weights take {_gib(engine.weights)} of rollout.memory_fraction="
            f"{config.rollout.memory_fraction:g}; give more devices to an engine (rollout.tensor_parallel)"
        ]
    model, width = engine.model, config.rollout.tensor_parallel
    per_token = model.kv_bytes_per_token(engine.item, width)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
    lines = [
        f"  KV cache: {model.full_layers} of {model.layers} layers, {per_token:,} bytes a token and engine rank; "
        f"an engine holds {engine.kv_tokens:,} tokens"
    ]
    if engine.state_slots is not None:
        state = model.state_bytes_per_request(CONV_BYTES, width)
        lines.append(
            f"  recurrent state: {state / MIB:.1f} MiB a request and engine rank; {engine.state_slots:,} requests"
        )
    wanted = math.ceil(config.rollout.max_inflight_groups * config.algorithm.group_size / config.engines)
    lines.append(
        f"  of {longest:,} tokens an engine holds {engine.full_length_requests:,} completions at once; "
        f"the run keeps up to {wanted:,} in flight on each, shorter ones need less"
    )
    return lines


def engines(config: RunConfig, device: Device, flags: Mapping[str, object]) -> list[str]:
    """The command line of an engine; address, port and key are found at start."""
    if config.rollout.urls:
        return ["Engines: running already, not started by this run"]
    words = ["python", "-m", "app.rollout.launcher", "--model-path", config.model.path or "<the tiny model>"]
    for flag, value in flags.items():
        if value is not None and value is not False:
            words += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    environment = [f"{name}={value}" for name, value in device.engine_env.items()]
    return ["An engine", *([f"  {' '.join(environment)}"] if environment else []), f"  {shlex.join(words)}"]


def push(config: RunConfig, device: Device, model: Architecture) -> list[str]:
    """Bytes and expected seconds of a push, and of the trainer's work in a step."""
    item = config.device.dtype.bytes
    size = model.parameters * item
    capacity = max(config.weight_sync.bucket_mib * MIB, model.largest_tensor * item)
    seconds = size / 1e9 * device.push_seconds_per_gb
    lines = [
        "A push",
        f"  {model.parameters:,} parameters in {config.device.dtype.name}: {size:,} bytes ({_gib(size)}) in at least "
        f"{math.ceil(size / capacity)} bucket(s) of up to {capacity / MIB:,.0f} MiB",
        f"  about {seconds:.1f} s at {device.push_seconds_per_gb:g} s a GB over {device.collective}"
        if seconds >= SHORTEST_TOLD
        else "  less than a second",
    ]
    if config.weight_sync.mode is SyncMode.delta:
        kept = size / config.placement.trainer_ranks
        place = "in host memory" if config.weight_sync.snapshot is SnapshotPlace.host else "on the device"
        lines.append(f"  of changes only (weight_sync.mode=delta): a trainer rank keeps {_gib(kept)} of it {place}")
    if device.peak_tflops is None:
        return lines
    factor = RECOMPUTED_FLOPS if config.trainer.activation_checkpointing else BACKWARD_FLOPS
    longest = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
    tokens = config.algorithm.trajectories_per_step * longest
    peak = device.peak_tflops * 1e12 * config.placement.trainer_ranks
    return [
        *lines,
        f"  training a step of full-length trajectories ({tokens:,} tokens): about "
        f"{factor * model.parameters * tokens / peak / UTILISATION:.0f} s at {UTILISATION:.0%} of "
        f"{device.peak_tflops:g} TFLOP/s a device ({device.card})",
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"

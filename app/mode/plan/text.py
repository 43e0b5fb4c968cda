"""The plan's sections on memory, weight sync, time, disk and engines, as lines of text."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace

from app.config import RunConfig
from app.config.model import ModelConfig
from app.config.weight_sync import SnapshotPlace, SyncMode
from app.device import Device
from app.mode.plan.duration import (
    BANDWIDTH_SHARE,
    FORWARD_FLOPS,
    UTILIZATION,
    mean_step_seconds,
    recomputed_tokens,
    step_seconds,
    step_tokens,
    sync_seconds,
    training_seconds,
)
from app.mode.plan.memory import MEAN_SHARE, EngineMemoryPlan, Phase, plan_engine, plan_memory, with_memory_settings
from app.mode.plan.trainer_memory import BACKWARD
from app.model.architecture import Architecture, adapter_parameters
from app.rollout.engine.server_args import VERIFIED, model_flags, render_flags, teacher_flags
from app.start.input_checks import CHECKPOINT_BYTES, plan_disk
from app.tracking.number_format import duration
from app.types import InFlight
from app.utils.units import GIB, MIB, size

MAX_ITEMS = 4  # items shown per phase
SMALLEST_SHOWN = 0.005 * GIB
SHORTEST_SYNC = 1.0  # seconds; below, latency outweighs bandwidth
RADIX_OFF = "disable-radix-cache"
RADIX_GAIN = 1.5  # times the completions, from which on repeated prefills of a prompt cost less


def memory(config: RunConfig, device: Device, model: Architecture, flags: Mapping[str, object]) -> list[str]:
    """One line per phase, then the peak phase and the capacity of the caches."""
    plan = plan_memory(config, device, model)
    total = plan.capacity.bytes
    decided = with_memory_settings(config, device, model)
    recomputed, moments = decided.trainer.activation_checkpointing.name, decided.offload.optimizer.name
    lines = [
        f"Memory of a device: {total / GIB:.1f} GiB ({plan.capacity.source}); activations are estimates, with "
        f"trainer.activation_checkpointing={recomputed} offload.optimizer={moments}"
    ]

    width = max(len(phase.name) for phase in plan.phases)
    for phase in plan.phases:
        lines.append(f"  {phase.device:<14}  {phase.name:<{width}}  {_gib(phase.bytes):>9}  = {_items(phase)}")

    peak = plan.peak_phase
    left = total - peak.bytes
    fit = f"{_gib(left)} left" if left >= 0 else f"DOES NOT FIT: {_gib(-left)} too much"
    lines.append(f"  peak: {peak.device}, {peak.name}: {_gib(peak.bytes)} of {_gib(total)}, {fit}")
    lines += [*_caches(config, model, plan.engine, flags), *_radix_cache(config, device, model, flags)]
    if config.teacher_devices:
        lines.append(_teacher_cache(config, plan.teacher))
    return lines


def _teacher_cache(config: RunConfig, teacher: EngineMemoryPlan | None) -> str:
    """Return what fits into the KV cache of the teacher that the run starts."""
    if teacher is None:
        return f"  teacher: no estimate, the shapes of teacher.path={config.teacher.path} are not on this machine"
    if teacher.cache_bytes <= 0:
        return f"  teacher: NO ROOM: weights take {_gib(teacher.weights)} of a device; raise teacher.devices"
    longest = config.rollout.max_tokens
    tokens, at_once = teacher.kv_tokens, teacher.fitting(longest)
    return f"  teacher: KV cache of {tokens:,} tokens; {at_once:,} sequences of {longest:,} tokens at once"


def _items(phase: Phase) -> str:
    largest = sorted(phase.items.items(), key=lambda item: -item[1])
    other = ("other", sum(size for _, size in largest[MAX_ITEMS:]))
    shown = [f"{name} {size / GIB:.2f}" for name, size in [*largest[:MAX_ITEMS], other] if size >= SMALLEST_SHOWN]
    return " + ".join(shown) or "negligible"


def _caches(config: RunConfig, model: Architecture, engine: EngineMemoryPlan, flags: Mapping[str, object]) -> list[str]:
    """Return what fits into an engine's caches, beside what the run keeps in flight."""
    rollout = config.rollout
    if not config.engines:
        return []
    if rollout.urls:
        return ["  caches: set by the running servers"]
    if engine.cache_bytes <= 0:
        return [
            f"  caches: NO ROOM: weights take {_gib(engine.weights)} of rollout.memory_fraction="
            f"{flags['mem-fraction-static']}; give each engine more devices (rollout.tensor_parallel)"
        ]

    lines = [
        f"  KV cache: {model.full_layers} of {model.layers} layers, {engine.token_bytes:,} bytes per "
        f"token and engine rank; {engine.kv_tokens:,} tokens per engine"
    ]
    if engine.state_requests is not None:
        lines.append(
            f"  recurrent states: {engine.states_per_request} of {engine.state_bytes / MIB:.1f} MiB per request and "
            f"engine rank; {engine.state_requests:,} requests"
        )
    if drafted := engine.drafting:
        lines.append(
            f"  drafts of rollout.speculative={rollout.speculative}: weights of {_gib(sum(drafted.values()))}, "
            f"{flags[VERIFIED]} tokens of a request verified a pass; the time below is without what they gain"
        )
    longest = rollout.max_tokens
    lines.append(
        f"  {engine.fitting(longest):,} completions of {longest:,} tokens fit per engine at once; "
        f"the run keeps up to {config.requests_per_engine:,} in flight on each, shorter ones need less"
    )
    return lines


def time(config: RunConfig, device: Device, model: Architecture) -> list[str]:
    """Expected seconds of a step, and the duration of the run."""
    engine = plan_memory(config, device, model).engine
    seconds = step_seconds(config, device, model, engine)
    if seconds is None:
        return [f"Time: no estimate on {device.kind.name}; a run logs what remains of it"]

    bound = "the longer of generation and training" if seconds.overlap else "one after the other"
    lines = [
        f"Time on {device.card}, with every trajectory at full length; shorter ones need less",
        f"  generate about {seconds.generate:.0f} s (decoding at {BANDWIDTH_SHARE:.0%} of "
        f"{device.memory_gb_per_s:,.0f} GB/s of memory), train about {seconds.train:.0f} s (at {UTILIZATION:.0%} of "
        f"{device.peak_tflops:g} TFLOP/s), sync about {seconds.sync:.1f} s",
        f"  a step: about {seconds.total:.0f} s ({bound}); {config.steps} steps: about "
        f"{duration(config.steps * seconds.total)}, without start, evaluations and checkpoints",
    ]
    if (mean := mean_step_seconds(config, device, model, engine)) is not None:
        lines.append(
            f"  with completions of {MEAN_SHARE:.0%} of the limit on average: generate about {mean.generate:.0f} s, "
            f"train about {mean.train:.0f} s, a step about {mean.total:.0f} s"
        )
    mode = config.placement.in_flight_or_default(keeps_cache=model.linear is None)
    if mode is InFlight.retract and not config.model.lora.enabled:
        tokens = recomputed_tokens(config, engine)
        again = FORWARD_FLOPS * model.parameters * tokens / config.rollout.tensor_parallel
        lines.append(
            f"  after a sync an engine prefills up to {tokens:,} tokens of what is in flight again: about "
            f"{again / ((device.peak_tflops or 1) * 1e12 * UTILIZATION):.1f} s"
        )
    if model.linear is None or device.linear_attention is None:
        return lines

    looped = replace(device, linear_attention=None)
    train = training_seconds(config, looped, model)
    largest = max(phase.bytes for phase in plan_memory(config, looped, model).phases if phase.name == BACKWARD)
    return [
        *lines,
        f"  linear attention trains in the kernels of {device.linear_attention}; in torch's loop, where they are not "
        f"installed or fail, train about {train:.0f} s, and the {BACKWARD} takes {_gib(largest)}",
    ]


def _radix_cache(config: RunConfig, device: Device, model: Architecture, flags: Mapping[str, object]) -> list[str]:
    """Return completions of half the full length at a time with and without the radix cache, for recurrent states."""
    if config.rollout.urls or model.linear is None or not config.engines:
        return []

    half = config.rollout.max_tokens // 2
    plans = (plan_engine(config, device, model, {**flags, RADIX_OFF: off}) for off in (False, True))
    cached, alone = (min(plan.requests, plan.fitting(half)) for plan in plans)
    line = f"  radix cache: {cached:,} completions of {half:,} tokens at a time with it, {alone:,} without"
    if flags.get(RADIX_OFF):
        return [f"{line}; it is off: each completion and turn prefills its whole prompt"]
    if alone < RADIX_GAIN * cached or config.environment.multi_turn:
        return [line]
    return [f"{line}: +rollout.engine_args.{RADIX_OFF}=true pays, though each completion then prefills its prompt"]


def disk(config: RunConfig, model: Architecture) -> list[str]:
    """Return the space that the run needs at most, and what it keeps."""
    checkpoint = config.checkpoint
    plan = plan_disk(config, model)
    lines = [f"Disk: up to {size(plan.bytes)} in the run's folder"]
    if not checkpoint.keep:
        lines.append("  no checkpoint is kept (checkpoint.keep=0)")
    else:
        best = "the best, " if checkpoint.keep_best else ""
        lines.append(
            f"  {plan.checkpoints} checkpoints of {size(plan.checkpoint)} ({CHECKPOINT_BYTES} bytes per parameter): "
            f"the newest {checkpoint.keep}, {best}one being written"
        )
    if not checkpoint.export:
        return [*lines, "  no model is exported (checkpoint.export=false)"]
    if not checkpoint.keep:
        lines.append(f"  one of {size(plan.checkpoint)} until the export is complete")
    return [*lines, f"  the exported model: up to {size(plan.export)}"]


def engines(config: RunConfig, device: Device, flags: Mapping[str, object]) -> list[str]:
    """The command lines of an engine and of the teacher's. Address, port and key are chosen at startup."""
    lines = [] if not config.engines else ["An engine", *_command(config.model, device, flags)]
    if config.rollout.urls:
        lines = ["Engines: already running, not started by this run"]
    if config.teacher_devices and (teacher := config.teacher.model(config.model)) is not None:
        lines += ["The teacher's engine", *_command(teacher, device, teacher_flags(config, device))]
    return lines


def _command(model: ModelConfig, device: Device, flags: Mapping[str, object]) -> list[str]:
    flags = {**model_flags(model.local if model.local.is_dir() else str(model.path), flags), **flags}
    environment = [" ".join(f"{name}={value}" for name, value in device.engine_env.items())]
    command = shlex.join(["python", "-m", "app.rollout.engine.entry", *render_flags(flags)])
    return [f"  {line}" for line in (*environment, command) if line]


def sync(config: RunConfig, device: Device, model: Architecture) -> list[str]:
    """Bytes and expected seconds of a weight sync, and a training step that would outlast its deadline."""
    sent = _adapters(config, model) if config.model.lora.enabled else _weights(config, device, model)
    lines = ["A weight sync", *sent]
    training = training_seconds(config, device, model)
    if training is not None and training > config.trainer.timeout_s and not config.stream:
        lines.append(
            f"  training a step of full-length trajectories ({step_tokens(config):,} tokens): about {training:.0f} s, "
            f"LONGER THAN trainer.timeout_s={config.trainer.timeout_s:g}"
        )
    return lines


def _adapters(config: RunConfig, model: Architecture) -> list[str]:
    trained = adapter_parameters(model, config.model.lora)
    sent = trained * config.device.dtype.bytes
    return [
        f"  adapters of rank {config.model.lora.rank}: {trained:,} parameters in {config.device.dtype.name}: {sent:,} "
        f"bytes ({sent / MIB:.1f} MiB); the base of {model.parameters:,} parameters is never sent",
        "  engines load them beside those in use, without a pause: a request ends with the adapter it began with",
    ]


def _weights(config: RunConfig, device: Device, model: Architecture) -> list[str]:
    item = config.device.dtype.bytes
    weights = model.parameters * item
    limit = (config.weight_sync.bucket_mib or device.bucket_mib) * MIB
    bucket = max(limit, model.largest_tensor * item)
    seconds = sync_seconds(config, device, model)

    lines = [
        f"  {model.parameters:,} parameters in {config.device.dtype.name}: {weights:,} bytes ({_gib(weights)}) in at "
        f"least {math.ceil(weights / bucket)} bucket(s) of up to {bucket / MIB:,.0f} MiB",
    ]
    if model.largest_tensor * item > limit:
        lines.append(
            f"  the largest tensor is a bucket of {bucket / MIB:,.0f} MiB by itself, since SGLang loads whole tensors: "
            f"rank 0 and each engine rank hold {_gib(2 * bucket)} during a sync"
        )
    rate = f"  about {seconds:.1f} s at {device.push_seconds_per_gb:g} s per GB over {device.collective}"
    lines.append(rate if seconds >= SHORTEST_SYNC else "  less than a second")
    if config.weight_sync.mode is SyncMode.delta:
        location = "in host memory" if config.weight_sync.snapshot is SnapshotPlace.host else "on the device"
        kept = _gib(weights * config.trainer.replicas / config.placement.trainer_ranks)
        lines.append(f"  weight_sync.mode=delta sends changes only: each trainer rank keeps {kept} {location}")
    return lines


def _gib(weights: float) -> str:
    return f"{weights / GIB:.2f} GiB"

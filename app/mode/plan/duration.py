"""How long a step and the run take, and how often the run sees each row, from rates that the plan names.

Decoding is bound by memory bandwidth: each decode step reads the weights once, and the KV cache and recurrent states of
every request in flight. Training is bound by arithmetic. The first estimate takes all trajectories at full length: an
upper bound of what these rates give. The second takes a stated share of it.
"""

from dataclasses import dataclass, replace

from app.config import RunConfig
from app.config.trainer import Checkpointing
from app.device import Device
from app.mode.plan.memory import MEAN_SHARE, EngineMemoryPlan, with_memory_settings
from app.mode.plan.trainer_memory import DELTA_CHUNK, FLOAT32, moments_on_host
from app.model.architecture import Architecture, adapter_parameters, trained_parameters

FORWARD_FLOPS = 2  # per parameter and token
FORWARD_BACKWARD_FLOPS = 6
LORA_FLOPS = 4  # a frozen weight has no gradient; those of the adapters are negligible
UTILIZATION = 0.4  # of peak FLOP/s, for a well-fed trainer
BANDWIDTH_SHARE = 0.5  # of peak memory bandwidth while decoding; a decode step also computes, samples and waits
STREAMING_SHARE = 0.7  # the same for one operator after the other over large tensors
HOST_GB_PER_S = 45  # copies between a device and pinned memory of its host: an H100's, 43 to 53 (card_run_h100.json)
# What torch's loop over chunks of linear attention reads and writes for a token, in float32 tensors as wide as the
# values: in a forward pass, in a backward pass, and there for each chunk of the sequence, whose gradient is as long as
# the sequence. Counted by `tests.bench.linear_counts`; it is bound by them, not by its launches.
LOOP_FORWARD, LOOP_BACKWARD, LOOP_BACKWARD_CHUNK = 96, 202, 20


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Estimated seconds of a step in which every trajectory has its full length."""

    generate: float
    train: float
    sync: float
    overlap: bool  # generation and training run at the same time

    @property
    def total(self) -> float:
        """Seconds from step to step."""
        work = max(self.generate, self.train) if self.overlap else self.generate + self.train
        return work + self.sync


def training_seconds(config: RunConfig, device: Device, model: Architecture) -> float | None:
    """Estimate the training of a step; None for a device whose rates are not known."""
    if device.peak_tflops is None or device.memory_gb_per_s is None:
        return None

    config = with_memory_settings(config, device, model)
    checkpointing = config.trainer.activation_checkpointing
    products = LORA_FLOPS if config.model.lora.enabled else FORWARD_BACKWARD_FLOPS
    if checkpointing in (Checkpointing.attention, Checkpointing.all):
        products += FORWARD_FLOPS
    scored = config.algorithm.needs_old_logprobs + config.algorithm.needs_reference  # forward passes before the updates
    # Two products of a token with the half of its sequence that it sees on average, forward and twice that backward.
    attention = 2 * config.rollout.max_tokens * model.full_layers * model.heads * model.head_dim
    passes = scored + (4 if checkpointing is Checkpointing.all else 3)
    flops = (products + FORWARD_FLOPS * scored) * model.parameters + passes * attention
    tokens = step_tokens(config) / config.placement.trainer_ranks
    seconds = flops / (device.peak_tflops * 1e12 * UTILIZATION)
    if model.linear is not None and device.linear_attention is None:
        chunks = config.rollout.max_tokens / DELTA_CHUNK
        forwards = scored + (1 if checkpointing is Checkpointing.none else 2)
        widths = LOOP_FORWARD * forwards + LOOP_BACKWARD + LOOP_BACKWARD_CHUNK * chunks
        moved = (model.layers - model.full_layers) * widths * FLOAT32 * model.linear.value_channels
        seconds += moved / (device.memory_gb_per_s * 1e9 * STREAMING_SHARE)

    moving = 0.0
    if moments_on_host(config, device):  # Adam's moments are copied both ways in each update of a step
        ranks = config.placement.trainer_ranks // config.trainer.replicas
        moments = 2 * FLOAT32 * trained_parameters(model, config.model.lora) / ranks
        moving = config.algorithm.updates_per_step * 2 * moments / (HOST_GB_PER_S * 1e9)
    return seconds * tokens + moving


def step_tokens(config: RunConfig) -> int:
    """Tokens of a step of full-length trajectories."""
    return config.algorithm.trajectories_per_step * config.rollout.max_tokens


def sync_seconds(config: RunConfig, device: Device, model: Architecture) -> float:
    """Estimate a weight sync from the device's measured or published rate."""
    lora = config.model.lora
    sent = adapter_parameters(model, lora) if lora.enabled else model.parameters
    return sent * config.device.dtype.bytes / 1e9 * device.push_seconds_per_gb


def step_seconds(
    config: RunConfig, device: Device, model: Architecture, engine: EngineMemoryPlan
) -> StepSeconds | None:
    """Estimate a step; None for a device whose rates are not known, or for engines that the run does not start."""
    train = training_seconds(config, device, model)
    if train is None or device.memory_gb_per_s is None or (reads := decode_reads(config, engine)) is None:
        return None

    steps, read = reads
    generate = steps * read / (device.memory_gb_per_s * 1e9 * BANDWIDTH_SHARE)
    syncing = sync_seconds(config, device, model) if config.engines else 0.0
    return StepSeconds(generate, train, syncing, overlap=not config.placement.colocated)


def mean_step_seconds(
    config: RunConfig, device: Device, model: Architecture, engine: EngineMemoryPlan
) -> StepSeconds | None:
    """Estimate a step whose completions have `MEAN_SHARE` of the full length on average, and the longest all of it."""
    limit = config.rollout.max_completion_tokens
    mean = round(MEAN_SHARE * limit)
    decided = with_memory_settings(config, device, model)  # by the full length
    shorter = replace(decided, rollout=replace(config.rollout, max_completion_tokens=mean))
    seconds = step_seconds(shorter, device, model, engine)
    samples_on_policy = config.engines and config.placement.max_staleness == 0
    if seconds is None or device.memory_gb_per_s is None or not samples_on_policy:
        return seconds
    # On-policy, the last completions of a step decode nearly alone.
    tail = (limit - mean) * engine.weights / (device.memory_gb_per_s * 1e9 * BANDWIDTH_SHARE)
    return replace(seconds, generate=seconds.generate + tail)


def recomputed_tokens(config: RunConfig, engine: EngineMemoryPlan) -> int:
    """Tokens whose cache an engine computes again after a sync that retracts, with its requests halfway through."""
    halfway = config.rollout.max_tokens - config.rollout.max_completion_tokens // 2
    return _at_once(config, engine) * halfway


def _at_once(config: RunConfig, engine: EngineMemoryPlan) -> int:
    """Completions of full length that an engine decodes at once."""
    return min(config.requests_per_engine, engine.requests, engine.fitting(config.rollout.max_tokens))


def decode_reads(config: RunConfig, engine: EngineMemoryPlan) -> tuple[float, float] | None:
    """Return an engine's decode steps in a step, and the bytes of weights and caches that a rank reads in each.

    None: the run does not start its engines, or no completion fits.
    """
    if not config.engines:  # a supervised run
        return 0.0, 0.0
    if config.rollout.urls or engine.cache_bytes <= 0 or (at_once := _at_once(config, engine)) == 0:
        return None

    completion = config.rollout.max_completion_tokens
    longest = config.rollout.max_tokens

    # halfway through, a request has its prompt and half of its completion
    caches = at_once * ((longest - completion / 2) * engine.token_bytes + engine.state_bytes)
    return config.algorithm.trajectories_per_step * completion / config.engines / at_once, engine.weights + caches

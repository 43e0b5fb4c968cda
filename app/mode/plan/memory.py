"""Memory of an engine rank, as SGLang allocates it, and of a device in every phase of a run.

Weights and caches share `rollout.memory_fraction` of the device; the rest is for activations and graphs. After the
weights, a model with linear attention gives 0.9 / 1.9 of the remainder to request states (SGLang's default
mamba_full_memory_ratio); the KV cache gets what is left, bounded by `max-total-tokens`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.config import RunConfig
from app.config.device import DeviceKind
from app.config.engine_flags import STATE_FLAG
from app.config.offload import OptimizerOffload
from app.config.trainer import Checkpointing
from app.device import Device
from app.mode.plan.trainer_memory import FLOAT32, Items, TrainerMemoryPlan, plan_trainer
from app.model.architecture import Architecture, adapter_parameters, architecture_of, draft_of
from app.rollout.engine.server_args import VERIFIED, engine_flags, teacher_flags
from app.utils.units import GIB

CONV_BYTES = 2  # SGLang keeps the inputs of the convolution in bfloat16
STATE_SHARE = 0.9 / 1.9
DEFAULT_PREFILL = 8192  # tokens of a prefill chunk
STATES_PER_REQUEST = 3  # SGLang's MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO
SCORED_AT_ONCE = 2048  # tokens whose logits a scoring engine has at a time: SGLang's SGLANG_LOGPROB_CHUNK_SIZE
MEAN_SHARE = 0.4  # of rollout.max_completion_tokens that a completion has on average
IN_FLIGHT_SHARE = MEAN_SHARE / 2  # of the longest sequence, that a request in flight has in the KV cache: it is halfway
FILLED = 0.9  # of a device that `auto` recomputation fills at most
RECOMPUTATIONS = (Checkpointing.none, Checkpointing.matmuls, Checkpointing.attention, Checkpointing.all)
TRACKING_STATES = 2  # and what its radix cache takes of each request


@dataclass(frozen=True, slots=True)
class EngineMemoryPlan:
    """Memory of one tensor-parallel rank."""

    weights: float  # bytes
    cache_bytes: float  # what the weights leave for caches; negative if they do not fit
    token_bytes: int  # KV cache of a token
    state_bytes: int  # linear-attention state of a request
    kv_tokens: int  # capacity of the KV cache
    state_slots: int | None  # states that fit; None: the model has no such state
    states_per_request: int
    requests: int  # that it runs at once, at most
    activations: float  # bytes
    kept: Items  # weights that no sync would bring back, so that they are not released
    resident: Items  # what no release frees
    drafting: Items  # weights of a draft, which a release frees: they have a copy in host memory
    verified_states: float = 0.0  # bytes: one state of each drafted token of each request

    @property
    def state_requests(self) -> int | None:
        """Requests whose states fit."""
        return None if self.state_slots is None else self.state_slots // self.states_per_request

    def fitting(self, tokens: int) -> int:
        """Requests of this length whose caches fit."""
        fitting = self.kv_tokens // tokens
        return fitting if self.state_requests is None else min(fitting, self.state_requests)

    @property
    def caches(self) -> Items:
        items: Items = {"KV cache": self.kv_tokens * self.token_bytes}
        if self.state_slots is not None:
            items["recurrent states"] = self.state_slots * self.state_bytes + self.verified_states
        return items

    @property
    def generating(self) -> Items:
        """What an engine uses while it generates."""
        work = {"engine weights": self.weights, "engine activations": self.activations}
        return {**work, **self.drafting, **self.kept, **self.caches, **self.resident}

    def syncing(self, bucket: float) -> Items:
        """What an engine with released caches uses during a sync: weights, and a bucket with the loader's copy."""
        weights = {"engine weights": self.weights, **self.drafting, **self.kept}
        return {**weights, "received bucket": 2 * bucket, **self.resident}


def plan_engine(
    config: RunConfig, device: Device, model: Architecture, flags: Mapping[str, object], *, logit_rows: int = 0
) -> EngineMemoryPlan:
    """Plan an engine rank that starts with these SGLang flags.

    `logit_rows` is the number of tokens whose logits it computes at once; 0: one of each request.
    """
    item = config.device.dtype.bytes
    width = int(str(flags["tp-size"]))
    weights = (model.parameters + model.vision_parameters) * item / width

    kept: Items = {}
    if flags.get("enable-lora"):
        slots = int(str(flags["max-loras-per-batch"]))
        adapters = slots * adapter_parameters(model, config.model.lora) * item / width
        kept = {"engine weights": weights, "engine adapters": adapters}

    share = float(str(flags["mem-fraction-static"])) * capacity(config, device).bytes
    cache_bytes = share - max(weights, sum(kept.values()))
    token_bytes = model.kv_bytes_per_token(item, width)
    drafting: Items = {}
    verified = int(str(flags.get(VERIFIED) or 0))
    draft = draft_of(config.rollout, model) if verified else None
    if draft is not None:
        drafting = {"draft weights": draft.parameters(width) * item}
        # SGLang sizes the caches before the draft's own embedding and head give way to the policy's.
        cache_bytes -= drafting["draft weights"] + draft.shared * item / width
        token_bytes += token_bytes * draft.layers // model.full_layers
    half = str(flags.get(STATE_FLAG)) in ("bfloat16", "float16")
    state_bytes = model.state_bytes_per_request(CONV_BYTES, width, item=2 if half else 4)
    requests = int(str(flags["max-running-requests"]))
    alone = flags.get("disable-radix-cache")  # then each request has one state, whatever the KV cache is left
    states_per_request = 1 if alone else STATES_PER_REQUEST + TRACKING_STATES
    slot_bytes = state_bytes * (1 + verified / states_per_request)
    state_slots = None
    if state_bytes:
        state_slots = requests if alone else max(0, int(cache_bytes * STATE_SHARE // slot_bytes))
    # An engine goes back to the state after the last accepted token: it keeps the state after each verified one.
    verified_states = float(verified * state_bytes * min(requests, (state_slots or 0) // states_per_request))
    kv_tokens = max(0, int((cache_bytes - (state_slots or 0) * state_bytes - verified_states) // token_bytes))
    kv_tokens = min(kv_tokens, int(str(flags.get("max-total-tokens") or kv_tokens)))

    # a prefill chunk in one layer, and the float32 logits twice (they become log-probabilities); those of all verified
    # tokens four times: of the graph, gathered, at the temperature, as log-probabilities
    chunk = int(str(flags.get("chunked-prefill-size") or DEFAULT_PREFILL))
    layer = min(chunk, kv_tokens or chunk) * (4 * model.hidden + 3 * model.ffn / width) * item
    copies = 4 * verified if verified else 2
    activations = layer + copies * FLOAT32 * (logit_rows or requests) * model.vocabulary

    return EngineMemoryPlan(
        weights=weights,
        cache_bytes=cache_bytes,
        token_bytes=token_bytes,
        state_bytes=state_bytes,
        kv_tokens=kv_tokens,
        state_slots=state_slots,
        states_per_request=states_per_request,
        requests=requests,
        activations=activations,
        kept=kept,
        resident={"engine runtime": device.engine_runtime_gib * GIB},
        drafting=drafting,
        verified_states=verified_states,
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of one device."""

    bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory use of one device in one phase of a step."""

    device: str  # "trainer device", "engine device", "shared device" or "teacher device"
    name: str
    items: Items

    @property
    def bytes(self) -> float:
        return sum(self.items.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All phases of all kinds of devices, in the order of a step."""

    capacity: Capacity
    engine: EngineMemoryPlan
    phases: list[Phase]
    training: tuple[str, ...]  # names of the phases of a train step
    teacher: EngineMemoryPlan | None = None  # of `teacher.path`, where its shapes are known

    @property
    def teacher_fits(self) -> bool:
        """Whether the weights of the teacher leave room for a KV cache."""
        return self.teacher is None or self.teacher.cache_bytes > 0

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)


def with_memory_settings(config: RunConfig, device: Device, model: Architecture | None) -> RunConfig:
    """Resolve what is `auto` of `trainer.activation_checkpointing` and `offload.optimizer` by a device's memory.

    It is the least recomputation that leaves a tenth free. Adam's moments go to the host between updates only if that
    needs it. If nothing leaves a tenth, it is what takes the least memory; of an unknown model, all is recomputed.
    """
    recomputed, moments = config.trainer.activation_checkpointing, config.offload.optimizer
    if recomputed is not Checkpointing.auto and moments is not OptimizerOffload.auto:
        return config

    recomputations = RECOMPUTATIONS if recomputed is Checkpointing.auto else (recomputed,)
    places = (OptimizerOffload.step, OptimizerOffload.update) if moments is OptimizerOffload.auto else (moments,)
    choices = [
        replace(
            config,
            trainer=replace(config.trainer, activation_checkpointing=what),
            offload=replace(config.offload, optimizer=place),
        )
        for place in places
        for what in recomputations
    ]
    if model is None:
        return choices[len(recomputations) - 1]
    for choice in choices:
        plan = plan_memory(choice, device, model)
        training = [phase.bytes for phase in plan.phases if phase.name in plan.training]
        if max(training) <= FILLED * plan.capacity.bytes:
            return choice
    return choices[-1]


def with_inflight_groups(config: RunConfig, device: Device, model: Architecture | None) -> RunConfig:
    """Resolve `rollout.max_inflight_groups=null`: as many groups as the engines' KV caches hold, and those of a step.

    With room for the full length of each the caches would be mostly empty: a request is halfway on average, and a group
    keeps its place until its longest completion ends. Null stays, and staleness alone is the bound, where the caches
    are unknown: those of `rollout.urls` or of a model of unknown shapes.
    """
    if config.rollout.max_inflight_groups is not None or config.rollout.urls or model is None:
        return config

    engine = plan_engine(config, device, model, engine_flags(config, device))
    requests = config.engines * engine.kv_tokens / (IN_FLIGHT_SHARE * config.rollout.max_tokens)
    groups = max(int(requests / config.algorithm.group_size), config.algorithm.prompts_per_step)
    return replace(config, rollout=replace(config.rollout, max_inflight_groups=groups))


def plan_memory(config: RunConfig, device: Device, model: Architecture) -> MemoryPlan:
    """Plan the memory of a run."""
    config = with_memory_settings(config, device, model)
    trainer = plan_trainer(config, device, model)
    engine = plan_engine(config, device, model, engine_flags(config, device))

    if config.shared_devices and config.engines:
        phases = _shared_phases(config, device, trainer, engine)
    else:
        base = {**trainer.offloadable, **trainer.resident}
        added = {**trainer.peaks, "sync": trainer.syncing}
        phases = [Phase("trainer device", name, {**base, **items}) for name, items in added.items()]
        if config.engines and not config.rollout.urls:
            syncing = {**engine.syncing(trainer.bucket), **engine.caches}  # the caches stay during a sync
            phases += [Phase("engine device", "generate", engine.generating), Phase("engine device", "sync", syncing)]

    teacher = plan_teacher(config, device)
    if teacher is not None:
        phases.append(Phase("teacher device", "score", teacher.generating))
    return MemoryPlan(capacity(config, device), engine, phases, tuple(trainer.peaks), teacher)


def plan_teacher(config: RunConfig, device: Device) -> EngineMemoryPlan | None:
    """Plan a rank of the teacher that the run starts; None without one, or if its shapes are unknown."""
    model = config.teacher.model(config.model)
    known = None if model is None or not config.teacher_devices else architecture_of(model)
    if known is None:
        return None
    return plan_engine(config, device, known, teacher_flags(config, device), logit_rows=SCORED_AT_ONCE)


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


def _shared_phases(
    config: RunConfig, device: Device, trainer: TrainerMemoryPlan, engine: EngineMemoryPlan
) -> list[Phase]:
    """Plan colocate, where either side may be offloaded while the other works."""
    idle_trainer, syncing_trainer = trainer.offloadable, trainer.offloadable
    if config.offload.trainer and device.shares_memory:
        idle_trainer, syncing_trainer = {}, trainer.parameters

    idle_engine = engine.generating
    syncing_engine = {**engine.syncing(trainer.bucket), **engine.caches}
    if config.offload.engine and device.shares_memory:
        idle_engine = {**engine.kept, **engine.resident}
        syncing_engine = engine.syncing(trainer.bucket)

    phases = {
        "generate": {**idle_trainer, **engine.generating},
        **{name: {**trainer.offloadable, **items, **idle_engine} for name, items in trainer.peaks.items()},
        "sync": {**syncing_trainer, **trainer.syncing, **syncing_engine},
    }
    return [Phase("shared device", name, {**trainer.resident, **items}) for name, items in phases.items()]

"""Command-line flags of an SGLang server. Imports no heavy library: `mode=plan` shows the flags."""

import zlib
from collections.abc import Mapping
from pathlib import Path

from app.config import RunConfig
from app.config.rollout import OWN_HEAD
from app.config.teacher import MAX_REQUESTS
from app.device import Device

MAX_SEED = 2**31 - 1
DRAFTED = 3  # tokens a pass; SGLang's choice for a chain of drafts
OWN_DRAFTS, DRAFT_MODEL, VERIFIED = "EAGLE", "speculative-draft-model-path", "speculative-num-draft-tokens"
# SGLang 0.5.23 takes a batch that a sync pauses in place for one that hangs: its watchdog would end the engine after
# 300 s. The engine's host looks for hangs itself (`rollout.stall_timeout_s`).
WATCHDOG_S = 86_400
SHARED_FRACTION = 0.7  # of a device's memory, where the trainer's runtime stays on it


def engine_flags(
    config: RunConfig, device: Device, *, index: int = 0, restarts: int = 0, resumed_at: int = 0
) -> dict[str, object]:
    """Return SGLang's flags by name: ours, then the device's, then `engine_args`. Later ones win.

    Args:
        restarts: How many engines had this index before; they were lost.
        resumed_at: The step after which this process continues the run.
    """
    colocate = config.placement.colocated
    # Above the largest captured batch an engine would decode without graphs; further requests wait for a place.
    batch = min(max(config.requests_per_engine, device.request_bounds[0]), device.request_bounds[1])
    return {
        "dtype": config.device.dtype.name,
        "tp-size": config.rollout.tensor_parallel,
        "random-seed": engine_seed(config.seed, index, restarts, resumed_at),
        "skip-tokenizer-init": not config.rollout.stop,
        "mem-fraction-static": memory_fraction(config, device),
        **capacity_flags(config, device, batch),
        "cuda-graph-max-bs-decode": batch,
        "trust-remote-code": config.model.trust_remote_code,
        "log-level-http": "warning",
        "watchdog-timeout": WATCHDOG_S,
        "enable-memory-saver": colocate and device.shares_memory and config.offload.engine,
        **(adapter_flags(config, device) if config.serves_adapters else {}),
        **(draft_flags(config, releases=colocate and device.shares_memory) if config.rollout.drafts else {}),
        **device.engine_flags,
        **config.device.engine_args,
        **config.rollout.engine_args,
    }


def teacher_flags(config: RunConfig, device: Device) -> dict[str, object]:
    """Return SGLang's flags of a teacher, which scores given tokens: no decode graphs, no weight sync, no adapters."""
    return {
        "dtype": config.device.dtype.name,
        "tp-size": config.teacher.devices,
        "random-seed": config.seed,
        "skip-tokenizer-init": True,
        "mem-fraction-static": device.engine_fraction,
        **capacity_flags(config, device, MAX_REQUESTS),
        "disable-cuda-graph": True,
        "trust-remote-code": config.model.trust_remote_code,
        "log-level-http": "warning",
        **device.engine_flags,
        **config.device.engine_args,
        **config.teacher.engine_args,
    }


def capacity_flags(config: RunConfig, device: Device, requests: int) -> dict[str, object]:
    """Return SGLang's flags for so many requests at a time, each of up to `rollout.max_tokens` tokens."""
    if device.max_kv_tokens is None:
        return {"max-running-requests": requests}
    # Of at least the fewest requests: SGLang refuses a request that fills the whole cache.
    needed = max(requests, device.request_bounds[0]) * config.rollout.max_tokens
    return {"max-running-requests": requests, "max-total-tokens": min(device.max_kv_tokens, needed)}


def adapter_flags(config: RunConfig, device: Device) -> dict[str, object]:
    """Return SGLang's flags for serving adapters.

    Requests of `max_staleness` + 1 policies are in flight while the next policy is loaded. In fully_async one more may
    be waiting to be unloaded.
    """
    limit = config.placement.max_staleness + (2 if config.placement.colocated else 3)
    return {
        "enable-lora": True,
        "max-lora-rank": config.model.lora.rank,
        # The decoder's (sglang_plugin/lora_layers.py); Qwen3.5's are not among SGLang's choices.
        "lora-target-modules": "all",
        "lora-backend": device.lora_backend,
        "lora-strict-loading": True,
        "max-loras-per-batch": limit,
        "max-loaded-loras": limit,
    }


def draft_flags(config: RunConfig, *, releases: bool) -> dict[str, object]:
    """Return SGLang's flags for `rollout.speculative`. `releases`: whether weights leave the device's memory.

    With a chain of drafts (topk 1) each is the draft's likeliest token d, accepted with the policy's p(d); else the
    token is sampled from the policy without d. That is a sample of p.
    """
    own = config.rollout.speculative == OWN_HEAD
    return {
        "speculative-algorithm": OWN_DRAFTS if own else "EAGLE3",
        **({} if own else {DRAFT_MODEL: str(Path(config.rollout.speculative).expanduser().absolute())}),
        "speculative-num-steps": DRAFTED,
        "speculative-eagle-topk": 1,
        VERIFIED: DRAFTED + 1,
        # No sync sends a draft: without a copy its memory would be undefined after a release.
        "enable-draft-weights-cpu-backup": releases and config.offload.engine,
    }


def model_flags(path: str | Path, flags: Mapping[str, object]) -> dict[str, object]:
    """Return the flags that name the model of a server with these flags.

    SGLang 0.5.23 gives no share of the KV cache to Qwen3.5's own head unless it is named as a draft.
    """
    own = flags.get("speculative-algorithm") == OWN_DRAFTS
    return {"model-path": path, **({DRAFT_MODEL: path} if own else {})}


def memory_fraction(config: RunConfig, device: Device) -> float:
    """Return the engines' share of a device's memory: `rollout.memory_fraction` with null resolved."""
    if config.rollout.memory_fraction is not None:
        return config.rollout.memory_fraction
    return SHARED_FRACTION if config.shared_devices and device.shares_memory else device.engine_fraction


def engine_seed(seed: int, index: int, restarts: int, resumed_at: int = 0) -> int:
    """Return the seed of an engine's sampling noise. Engines of one seed would sample the same noise.

    So would a run each time that it is preempted and resumed.

    >>> engine_seed(0, 0, 0), engine_seed(0, 1, 0), engine_seed(0, 1, 1)
    (268180898, 238974869, 2033796867)
    """
    attempt = f"/{resumed_at}" if resumed_at else ""
    return zlib.crc32(f"{seed}/{index}/{restarts}{attempt}".encode()) & MAX_SEED


def render_flags(flags: Mapping[str, object]) -> list[str]:
    """Return command-line arguments. True becomes a bare flag; False and None are left out.

    >>> render_flags({"tp-size": 2, "skip-tokenizer-init": True, "trust-remote-code": False})
    ['--tp-size', '2', '--skip-tokenizer-init']
    """
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{flag}")
        if value is not True:
            arguments.append(str(value))
    return arguments

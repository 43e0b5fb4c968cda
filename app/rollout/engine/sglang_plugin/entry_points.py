"""Runs inside SGLang's processes: SGLang's entry points into this package.

Inactive unless one of our hosts started the server (`POSTTRAIN_ENGINE_DEVICE` is set), so that installing this package
changes nothing for other users of SGLang in the same environment.
"""

import os
from multiprocessing import shared_memory
from typing import Any

from app.utils.process import MARK, SHARED_MEMORY, run_prefix

PLATFORM = "app.rollout.engine.sglang_plugin.platform:TorchCpuPlatform"
DEVICE_VARIABLE = "POSTTRAIN_ENGINE_DEVICE"
SYNCHRONIZE = "torch.cuda.synchronize"  # the weight checker of SGLang 0.5.22 calls it on every device
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
LOAD_REPORTS = "sglang.srt.managers.load_snapshot.shm_path_for"
RANDOM_CHARACTERS = 16
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
REPORT = "posttrain_requests"  # its key among the internal states of `/server_info`


def platform() -> str | None:
    """Return our platform on CPU; None lets SGLang choose. Entry point `sglang.srt.platforms`."""
    return PLATFORM if os.environ.get(DEVICE_VARIABLE) == "cpu" else None


def load() -> None:
    """Register our hooks. Entry point `sglang.srt.plugins`: runs in every process before models are imported."""
    if DEVICE_VARIABLE not in os.environ:
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from app.rollout.engine.sglang_plugin import delta_loader, lora_layers, patches

    loader, manager = delta_loader.DeltaLoader(), lora_layers.MANAGER
    hooks: list[tuple[str, Any, Any]] = [
        (SCHEDULER, require_hooks, HookType.BEFORE),
        (patches.BEGUN, patches.finish_batch, HookType.BEFORE),
        (patches.RESUMED, patches.clear_padding, HookType.AFTER),
        (patches.LOADED, patches.refresh_convolutions, HookType.AFTER),
        (patches.ADD_REQUEST, patches.add_one_req, HookType.AROUND),
        (delta_loader.LOAD_FROM_COLLECTIVE, loader.from_collective, HookType.AROUND),
        (delta_loader.LOAD_FROM_IPC, loader.from_ipc, HookType.AROUND),
        (manager + "init_lora_shapes", lora_layers.without_embeddings, HookType.AROUND),
        (manager + "load_lora_weights", lora_layers.refuse_unknown_names, HookType.AFTER),  # of a folder
        (manager + "load_lora_weights_from_tensors", lora_layers.refuse_unknown_names, HookType.AFTER),  # of a request
        (lora_layers.LAYER_SIZES, lora_layers.layer_sizes, HookType.AROUND),
        (INTERNAL_STATE, add_report, HookType.AFTER),
    ]
    if os.environ[DEVICE_VARIABLE] == "cpu":
        hooks += [
            (manager + "__init__", lora_layers.replace_torch, HookType.BEFORE),
            (lora_layers.PIN, lora_layers.not_pinned, HookType.REPLACE),
            (patches.SAMPLE, patches.sample, HookType.AROUND),
            (SYNCHRONIZE, skip_synchronize, HookType.REPLACE),
        ]
    if MARK in os.environ:
        hooks.append((LOAD_REPORTS, with_run_prefix, HookType.AFTER))
        name_shared_memory()
    for hook in hooks:
        HookRegistry.register(*hook)


def require_hooks(*_: Any, **__: Any) -> None:
    """Raise `RuntimeError` unless SGLang has installed all our hooks; the server does not start then.

    SGLang 0.5.23 only logs a plugin that raises and a target that it cannot patch. A server's main process calls this,
    and by a hook each of its schedulers.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    ours = {
        target
        for target, hooks in HookRegistry._hooks.items()
        if any(getattr(hook, "__module__", "").startswith("app.") for _, hook, _ in hooks)
    }
    if missing := {SCHEDULER, *ours} - HookRegistry._patched:
        why = "its log says why, or SGLANG_PLUGINS excludes them"
        raise RuntimeError(f"SGLang has not installed this package's hooks of {', '.join(sorted(missing))}: {why}")


def skip_synchronize(*_: Any) -> None:
    """Stand in for the wait for a GPU."""


def name_shared_memory() -> None:
    """Give Python's files in shared memory the run's name.

    A server ends by SIGKILL, which leaves them: 16 KB of load reports, and with tensor parallelism the ring buffers of
    its ranks. The process reaper removes what has the run's name.
    """
    prefix = f"/{run_prefix()}"
    vars(shared_memory).update(_SHM_NAME_PREFIX=prefix, _SHM_SAFE_NAME_LENGTH=len(prefix) + RANDOM_CHARACTERS)


def with_run_prefix(path: str, *_: Any) -> str:
    """Return the path of a server's load reports with the run's name."""
    return f"{SHARED_MEMORY}/{run_prefix()}{path.rpartition('/')[2]}"


# --- the report on unfinished requests


# SGLang's own health checks are satisfied by any output of the scheduler, so they cannot see that one request was lost
# while others are sampled. The engine's host compares this report with its requests in flight (rollout/progress.py).
def add_report(reply: Any, scheduler: Any, *_: Any) -> Any:
    """Add the report to one reply. Hook after `get_internal_state`."""
    reply.internal_state[REPORT] = unfinished(scheduler)
    return reply


def unfinished(scheduler: Any) -> dict[str, int | None]:
    """Return the sampled tokens of each unfinished request by id; None while it waits to be scheduled."""
    batches = [scheduler.running_batch, scheduler.last_batch]
    # With pipeline parallelism.
    batches += [*getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ())]
    scheduled = [request for batch in batches if batch is not None for request in batch.reqs]
    if scheduler.chunked_req is not None:
        scheduled.append(scheduler.chunked_req)

    report: dict[str, int | None] = {request.rid: None for request in scheduler.waiting_queue}
    report |= {request.rid: len(request.output_ids) for request in scheduled if not request.finished()}
    return report

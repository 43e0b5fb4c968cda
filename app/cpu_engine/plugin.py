"""Runs inside SGLang's processes on a CPU: the entry point `sglang.srt.plugins` of this package."""

import multiprocessing
import os
from typing import Any

from app.rollout.engine.sglang_plugin.entry_points import DEVICE_VARIABLE

PROCESS_REQUESTS = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
SET_START_METHOD = "sglang.srt.entrypoints.engine._set_envs_and_config"


def load() -> None:
    """Register our hooks. Inactive unless one of our hosts started the server, on a CPU."""
    if os.environ.get(DEVICE_VARIABLE) != "cpu":
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from app.cpu_engine import batched_attention, dense_model, gated_delta, matmul, operators

    matmul.use_onednn_matmul()
    batched_attention.register()
    operators.register()
    dense_model.register()
    gated_delta.register()
    HookRegistry.register(SET_START_METHOD, fork_children, HookType.AFTER)
    HookRegistry.register(PROCESS_REQUESTS, sleep_while_paused, HookType.AFTER)


def fork_children(result: Any, *_: Any, **__: Any) -> Any:
    """Fork the server's processes. Runs as a hook after SGLang has set the start method to spawn.

    Spawned children re-import everything; that is needed only if the parent has already initialized a device. Forked
    children start at once and share the memory of imported modules.
    """
    multiprocessing.set_start_method("fork", force=True)
    return result


def sleep_while_paused(result: Any, scheduler: Any, *_: Any) -> Any:
    """Make a paused scheduler sleep until the next request. Runs as a hook after it has polled for requests.

    A paused scheduler polls in a busy loop, which takes a core from the trainer; `--sleep-on-idle` does not cover it.
    """
    if scheduler._engine_paused:
        scheduler.maybe_sleep_on_idle()
    return result

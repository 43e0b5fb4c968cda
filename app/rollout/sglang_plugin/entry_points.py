"""What we add to SGLang, through its public entry points only: a platform for plain-torch CPUs, its attention, the
kernels that Qwen3.5 needs there, rest while it is paused, and delta pushes.

Inactive unless the server was started by us (`POSTTRAIN_ENGINE_DEVICE`), so that installing this package changes
nothing for other uses of SGLang in the same environment.
"""

import multiprocessing
import os
from typing import Any

DEVICE_VARIABLE = "POSTTRAIN_ENGINE_DEVICE"
TAKES_REQUESTS = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
CHOOSES_START_METHOD = "sglang.srt.entrypoints.engine._set_envs_and_config"


def platform() -> str | None:
    """Entry point `sglang.srt.platforms`."""
    return "app.rollout.sglang_plugin.platform:TorchCpuPlatform" if os.environ.get(DEVICE_VARIABLE) == "cpu" else None


def load() -> None:
    """Entry point `sglang.srt.plugins`: runs in every SGLang process before models are imported."""
    if DEVICE_VARIABLE in os.environ:
        from app.rollout.sglang_plugin import delta_loader as loader

        loader.register()
    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from app.rollout.sglang_plugin import cpu_attention as attention
        from app.rollout.sglang_plugin import cpu_gated_delta as gated_delta

        attention.register()
        gated_delta.register()
        HookRegistry.register(CHOOSES_START_METHOD, fork_children, HookType.AFTER)
        HookRegistry.register(TAKES_REQUESTS, rest_while_paused, HookType.AFTER)


def fork_children(result: Any, *_: Any, **__: Any) -> Any:
    """After SGLang chose to spawn its processes, which import everything again, as they must where a device is in use.

    Without a device they may be forked: they start at once and share the memory of what was imported.
    """
    multiprocessing.set_start_method("fork", force=True)
    return result


def rest_while_paused(result: Any, scheduler: Any, *_: Any) -> Any:
    """A paused scheduler asks for requests without end, which takes a core from the trainer; `--sleep-on-idle` is only
    minded by one that runs. It wakes with the next request."""
    if scheduler._engine_paused:
        scheduler.maybe_sleep_on_idle()
    return result

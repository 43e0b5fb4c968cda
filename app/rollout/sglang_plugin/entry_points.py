"""Runs inside SGLang's processes: SGLang's entry points into this package.

Inactive unless one of our hosts started the server (`POSTTRAIN_ENGINE_DEVICE` is set), so that installing this package
changes nothing for other users of SGLang in the same environment.
"""

import multiprocessing
import os
from typing import Any

DEVICE_VARIABLE = "POSTTRAIN_ENGINE_DEVICE"
PROCESS_REQUESTS = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
SET_START_METHOD = "sglang.srt.entrypoints.engine._set_envs_and_config"
SYNCHRONIZE = "torch.cuda.synchronize"  # the weight checker of SGLang 0.5.22 calls it on every device


def platform() -> str | None:
    """Return our platform on CPU; None lets SGLang choose. Entry point `sglang.srt.platforms`."""
    return "app.rollout.sglang_plugin.platform:TorchCpuPlatform" if os.environ.get(DEVICE_VARIABLE) == "cpu" else None


def load() -> None:
    """Register our hooks. Entry point `sglang.srt.plugins`: runs in every process before models are imported."""
    if DEVICE_VARIABLE not in os.environ:
        return

    from app.rollout.sglang_plugin import delta_loader, lora_layers, request_report, shared_memory

    delta_loader.register()
    lora_layers.register()
    request_report.register()
    shared_memory.register()
    if os.environ[DEVICE_VARIABLE] == "cpu":
        _load_for_cpu()


def _load_for_cpu() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from app.device.cpu_matmul import use_onednn_matmul
    from app.rollout.sglang_plugin import lora_layers
    from app.rollout.sglang_plugin.cpu import batched_attention, gated_delta, operators, qwen3_model, weight_buffers

    use_onednn_matmul()
    batched_attention.register()
    operators.register()
    qwen3_model.register()
    gated_delta.register()
    lora_layers.register_for_cpu()
    weight_buffers.register()
    HookRegistry.register(SET_START_METHOD, fork_children, HookType.AFTER)
    HookRegistry.register(PROCESS_REQUESTS, sleep_while_paused, HookType.AFTER)
    HookRegistry.register(SYNCHRONIZE, nothing_to_wait_for, HookType.REPLACE)


def fork_children(result: Any, *_: Any, **__: Any) -> Any:
    """Fork the server's processes. Hook after SGLang set the start method to spawn.

    Spawned children import everything again, which only a device in use requires. Forked children start at once and
    share the memory of imported modules.
    """
    multiprocessing.set_start_method("fork", force=True)
    return result


def sleep_while_paused(result: Any, scheduler: Any, *_: Any) -> Any:
    """Make a paused scheduler sleep until the next request. Hook after it polled for requests.

    A paused scheduler polls in a busy loop, which takes a core from the trainer; `--sleep-on-idle` does not cover it.
    """
    if scheduler._engine_paused:
        scheduler.maybe_sleep_on_idle()
    return result


def nothing_to_wait_for(*_: Any) -> None:
    """Stand in for the wait for a GPU."""

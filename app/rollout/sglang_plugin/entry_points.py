"""Runs inside SGLang's processes: SGLang's entry points into this package.

Inactive unless one of our hosts started the server (`POSTTRAIN_ENGINE_DEVICE` is set), so that installing this package
changes nothing for other users of SGLang in the same environment.
"""

import os
from typing import Any

DEVICE_VARIABLE = "POSTTRAIN_ENGINE_DEVICE"
SYNCHRONIZE = "torch.cuda.synchronize"  # the weight checker of SGLang 0.5.22 calls it on every device


def platform() -> str | None:
    """Return our platform on CPU; None lets SGLang choose. Entry point `sglang.srt.platforms`."""
    return "app.rollout.sglang_plugin.platform:TorchCpuPlatform" if os.environ.get(DEVICE_VARIABLE) == "cpu" else None


def load() -> None:
    """Register our hooks. Entry point `sglang.srt.plugins`: runs in every process before models are imported."""
    if DEVICE_VARIABLE not in os.environ:
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from app.rollout.sglang_plugin import delta_loader, lora_layers, request_report, shared_memory

    delta_loader.register()
    lora_layers.register()
    request_report.register()
    shared_memory.register()
    if os.environ[DEVICE_VARIABLE] == "cpu":
        from app.rollout.sglang_plugin import sampling, shared_prompts

        lora_layers.register_for_cpu()
        sampling.register()
        shared_prompts.register()
        HookRegistry.register(SYNCHRONIZE, nothing_to_wait_for, HookType.REPLACE)


def nothing_to_wait_for(*_: Any) -> None:
    """Stand in for the wait for a GPU."""

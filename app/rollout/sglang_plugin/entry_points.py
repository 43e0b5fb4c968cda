"""Runs inside SGLang's processes: SGLang's entry points into this package.

Inactive unless one of our hosts started the server (`POSTTRAIN_ENGINE_DEVICE` is set), so that installing this package
changes nothing for other users of SGLang in the same environment.
"""

import os
from multiprocessing import shared_memory
from typing import Any

from app.utils.process import MARK, SHARED_MEMORY, run_prefix

DEVICE_VARIABLE = "POSTTRAIN_ENGINE_DEVICE"
SYNCHRONIZE = "torch.cuda.synchronize"  # the weight checker of SGLang 0.5.22 calls it on every device
LOAD_REPORTS = "sglang.srt.managers.load_snapshot.shm_path_for"
RANDOM_CHARACTERS = 16


def platform() -> str | None:
    """Return our platform on CPU; None lets SGLang choose. Entry point `sglang.srt.platforms`."""
    return "app.rollout.sglang_plugin.platform:TorchCpuPlatform" if os.environ.get(DEVICE_VARIABLE) == "cpu" else None


def load() -> None:
    """Register our hooks. Entry point `sglang.srt.plugins`: runs in every process before models are imported."""
    if DEVICE_VARIABLE not in os.environ:
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from app.rollout.sglang_plugin import delta_loader, lora_layers, request_report

    delta_loader.register()
    lora_layers.register()
    request_report.register()
    name_shared_memory()
    if os.environ[DEVICE_VARIABLE] == "cpu":
        from app.rollout.sglang_plugin import sampling, shared_prompts

        lora_layers.register_for_cpu()
        sampling.register()
        shared_prompts.register()
        HookRegistry.register(SYNCHRONIZE, skip_synchronize, HookType.REPLACE)


def skip_synchronize(*_: Any) -> None:
    """Stand in for the wait for a GPU."""


def name_shared_memory() -> None:
    """Give SGLang's files in shared memory the run's name, unless the run has no mark on this machine.

    A server ends by SIGKILL, which leaves them: 16 KB of load reports, and with tensor parallelism the ring buffers of
    its ranks. The process reaper removes what has the run's name.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if MARK in os.environ:
        HookRegistry.register(LOAD_REPORTS, with_run_prefix, HookType.AFTER)
        prefix = f"/{run_prefix()}"
        vars(shared_memory).update(_SHM_NAME_PREFIX=prefix, _SHM_SAFE_NAME_LENGTH=len(prefix) + RANDOM_CHARACTERS)


def with_run_prefix(path: str, *_: Any) -> str:
    """Return the path of a server's load reports with the run's name."""
    return f"{SHARED_MEMORY}/{run_prefix()}{path.rpartition('/')[2]}"

"""What we add to SGLang, through its public entry points only: a platform for plain-torch CPUs, its attention, the
kernels that Qwen3.5 needs there, and delta pushes.

Inactive unless the server was started by us (`POSTTRAIN_ENGINE_DEVICE`), so that installing this package changes
nothing for other uses of SGLang in the same environment.
"""

import os

DEVICE_VARIABLE = "POSTTRAIN_ENGINE_DEVICE"


def platform() -> str | None:
    """Entry point `sglang.srt.platforms`."""
    return "app.rollout.platform:TorchCpuPlatform" if os.environ.get(DEVICE_VARIABLE) == "cpu" else None


def load() -> None:
    """Entry point `sglang.srt.plugins`: runs in every SGLang process before models are imported."""
    if DEVICE_VARIABLE in os.environ:
        from app.rollout import loader

        loader.register()
    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        from app.rollout import attention, gated_delta

        attention.register()
        gated_delta.register()

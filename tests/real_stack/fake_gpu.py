"""H100s for code that asks only which devices there are. Nothing computes on them."""

from types import SimpleNamespace
from typing import Any

import torch

NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
TOTAL_BYTES, FREE_BYTES = 85_029_158_912, 84_000_000_000
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=TOTAL_BYTES,
    multi_processor_count=132,
    uuid="GPU-aaaa-bbbb",
    gcnArchName="",
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    L2_cache_size=50 * 2**20,
    is_integrated=False,
    is_multi_gpu_board=False,
)


def pretend(devices: int) -> None:
    """Let `torch.cuda` of this process describe so many H100s."""

    def always(value: Any) -> Any:
        return lambda *_, **__: value

    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": devices,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_properties": PROPERTIES,
        "get_device_name": NAME,
        "mem_get_info": (FREE_BYTES, TOTAL_BYTES),
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "memory_reserved": 0,
        **dict.fromkeys(("_lazy_init", "set_device", "synchronize", "empty_cache")),
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, always(value))

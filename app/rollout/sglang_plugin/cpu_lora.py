"""Runs inside SGLang's processes: lets SGLang's LoRA backend `torch_native` run on a CPU.

It pins host memory for copies to a device. Without a device, torch raises an error instead: here its two modules get a
`torch` that does not pin (SGLang 0.5.23: lora/backend/torch_backend.py:225-244; lora/layers.py:145, 324, 479, 594).
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager.__init__"
PIN = "torch.Tensor.pin_memory"


def register() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(MANAGER, replace_torch, HookType.BEFORE)
    HookRegistry.register(PIN, not_pinned, HookType.REPLACE)


def replace_torch(*_: Any, **__: Any) -> None:
    """Give the modules of the backend a torch that does not pin. Hook before the LoRA manager is made."""
    import sglang.srt.lora.backend.torch_backend as backend
    import sglang.srt.lora.layers as layers

    backend.torch = layers.torch = unpinned_torch()


def unpinned_torch() -> ModuleType:
    """Return a copy of the module `torch` whose `tensor` and `zeros` ignore `pin_memory`."""
    module = ModuleType("torch")
    module.__dict__.update(vars(torch))
    module.__dict__.update(tensor=unpinned(torch.tensor), zeros=unpinned(torch.zeros))
    return module


def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `make` without its argument `pin_memory`."""

    @wraps(make)
    def make_unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*args, **options)

    return make_unpinned


def not_pinned(tensor: Tensor, *_: Any) -> Tensor:
    """Stand in for `Tensor.pin_memory`."""
    return tensor

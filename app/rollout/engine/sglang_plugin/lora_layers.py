"""Runs inside SGLang's processes: corrections of its LoRA serving for our models, and for a trainer that sends many.

The hooks act only on a server that runs with `--enable-lora`.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager."
LAYER_SIZES = "sglang.srt.lora.utils.get_hidden_dim"
PIN = "torch.Tensor.pin_memory"
EMBEDDINGS = {"embed_tokens", "lm_head"}


def without_embeddings(
    original: Callable[..., None], manager: Any, *, max_lora_rank: int | None, target_modules: set[str] | None
) -> None:
    """Resolve `--lora-target-modules all` to the linear layers of the decoder."""
    from sglang.srt.lora.utils import auto_detect_lora_target_modules

    # SGLang includes embeddings and LM head, which would get buffers and kernels for adapters that never come.
    if target_modules == {"all"}:
        target_modules = auto_detect_lora_target_modules(manager.base_model) - EMBEDDINGS
    original(manager, max_lora_rank=max_lora_rank, target_modules=target_modules)


def layer_sizes(original: Callable[..., Any], name: str, config: Any, model: Any, layer: int, *rest: Any) -> Any:
    """Return the input and output width of a linear layer."""
    # Of Qwen3.5 only the class of the text model inside has `get_hidden_dim`, and SGLang calls the outer one's.
    body = getattr(model, "model", None)
    if body is not None and hasattr(body, "get_hidden_dim") and not hasattr(model, "get_hidden_dim"):
        return body.get_hidden_dim(name, layer)
    return original(name, config, model, layer, *rest)


def refuse_unknown_names(_: None, manager: Any, adapter: Any, *__: Any, **___: Any) -> None:
    """Raise `ValueError` if a tensor of a loaded adapter belongs to no layer. Hook after its load."""
    from sglang.srt.lora.utils import get_target_module_name

    loaded = manager.loras[adapter.lora_id]
    for name in [name for layer in loaded.layers for name in layer.weights]:
        try:
            get_target_module_name(name, manager.target_modules)
        except ValueError:
            # SGLang would find the name when a batch needs the adapter, and its scheduler would end.
            del manager.loras[adapter.lora_id]
            raise ValueError(f"{name} belongs to no layer that takes an adapter") from None


# --- on a CPU


def replace_torch(*_: Any, **__: Any) -> None:
    """Give the modules of SGLang's LoRA backend `torch_native` a torch that does not pin host memory.

    Without a device, torch raises an error instead (SGLang 0.5.23: lora/backend/torch_backend.py:225-244;
    lora/layers.py:145, 324, 479, 594). Hook before the LoRA manager is made.
    """
    import sglang.srt.lora.backend.torch_backend as backend
    import sglang.srt.lora.layers as layers

    module = ModuleType("torch")
    module.__dict__.update(vars(torch), tensor=unpinned(torch.tensor), zeros=unpinned(torch.zeros))
    backend.torch = layers.torch = module


def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `make` without its argument `pin_memory`."""

    @wraps(make)
    def make_unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*args, **options)

    return make_unpinned


def not_pinned(tensor: Tensor, *_: Any) -> Tensor:
    """Stand in for `Tensor.pin_memory`."""
    return tensor

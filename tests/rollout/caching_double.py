"""An SGLang plugin whose engines keep a transposed copy of a weight from its first use on, as engines on NPUs do.

There SGLang 0.5.23 keeps such copies of Qwen3.5's convolutions (hardware_backend/npu/attention/ascend_gdn_backend.py).
Here the copies are of the output projections of attention and MLP, so that any dense model on a CPU has them. An
engine whose copies are not refreshed after an update computes with the projections of its first forward pass.

It is switched on by `environment(folder)` of a run with `imports_sglang=True`, or of a server with `fork=None`: the
session's fork server does not have the folder on its path.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VARIABLE = "POSTTRAIN_TEST_CACHED_IN"  # the attribute of a layer that has its copy
STALE = "_never_refreshed"  # no hook of the application knows it
REFRESHED = "_conv_weights_t"  # of SGLang's backends for NPUs; the application refreshes it after an update
PREFILL = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
DECODE = "app.cpu_engine.dense_model.projected"  # takes the modules' place in a decode step
LAYERS = "RowParallelLinear"  # the output projections of attention and MLP


def environment(folder: Path, attribute: str = STALE) -> dict[str, str]:
    """Variables with which SGLang finds this plugin in `folder`, as if it were installed."""
    from tests.rollout.support import install_plugin  # not in SGLang's processes

    path = install_plugin(folder, __name__)["PYTHONPATH"]
    return {VARIABLE: attribute, "PYTHONPATH": os.pathsep.join([path, str(Path(__file__).parents[2])])}


def assignments(variables: Mapping[str, str]) -> list[str]:
    """Arguments of the command `env`."""
    return [f"{name}={value}" for name, value in variables.items()]


def load() -> None:
    """SGLang's entry point: runs in every process of a server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(PREFILL, apply, HookType.AROUND)
    HookRegistry.register(DECODE, projected, HookType.AROUND)


def apply(original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by the layer's copy, where it keeps one."""
    if type(layer).__name__ != LAYERS:
        return original(method, layer, x, bias)
    product = torch.matmul(x, transposed(layer))
    return product if bias is None else product + bias


def projected(original: Callable[..., Tensor], layer: Any, x: Tensor) -> Tensor:
    return apply(lambda _, layer, x, __: original(layer, x), None, layer, x, layer.bias)


def transposed(layer: Any) -> Tensor:
    """The layer's copy, made on first use."""
    attribute = os.environ[VARIABLE]
    copy: Tensor | None = getattr(layer, attribute, None)
    if copy is None:
        layer.conv_weights = layer.weight.detach()  # a view of the parameter, which SGLang's layers keep beside it
        copy = layer.conv_weights.transpose(0, 1).contiguous()
        setattr(layer, attribute, copy)
    return copy

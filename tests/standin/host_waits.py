"""Counts where the host waits for the device, by line, as operators are dispatched."""

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default}
SOURCES = ("/app/", "/transformers/", "/torch/distributed/", "/torch/optim/")


class HostWaits(TorchDispatchMode):
    """Example::

    with HostWaits("npu") as found:
        step.finish()
    found.lines  # {"app/trainer/reductions.py:74 _to_copy": 1}
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._waits(func, args, kwargs):
            self.lines[f"{_line()} {func.name().removeprefix('aten::')}"] += 1
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func in READS:
            return self._on_device(args[0])
        if func is aten._to_copy.default:
            to = kwargs.get("device")
            crosses = to is not None and self._on_device(args[0]) != (torch.device(to).type == self.device)
            return crosses and not kwargs.get("non_blocking")
        if func is aten.copy_.default:
            return self._on_device(args[0]) != self._on_device(args[1]) and not (len(args) > 2 and args[2])
        if func in (aten.index.Tensor, aten.index_put_.default):
            return any(each is not None and each.dtype == torch.bool and self._on_device(each) for each in args[1])
        return False

    def _on_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self.device


def _line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        for source in SOURCES:
            if source in name and "/tests/" not in name:
                return f"{source.strip('/')}/{name.split(source)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"

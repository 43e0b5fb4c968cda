"""Kernels of fla-core against their definition, in Triton's interpreter, which needs no device.

    pip install --no-deps --target /tmp/fla fla-core==0.6.0
    PYTHONPATH=/tmp/fla TRITON_INTERPRET=1 python -m tests.model.interpreted_kernels cuda

Prints JSON: the relative errors in float32 of each case's output and gradients, by their norms, the kernels that fla
selected for a device, `cuda` or `npu`, and its modules that copied something to the device. (The interpreter's matrix
products of bfloat16 are wrong.) A sequence is longer than a chunk of 64 tokens, one is shorter than the convolution.
"""

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from app.device.base import FLA_KERNELS
from app.model.packing import Packing
from tests.model.linear_double import DOUBLE

BOUNDARIES = (0, 5, 75, 77)
CHANNELS, KERNEL = 64, 4
HEADS = {"two heads": (2, 2, 16), "grouped heads of full width": (1, 2, 128)}  # of keys and values, and their width


class Index(int):
    """A loop's variable, as Triton's compiler makes it."""

    def to(self, _: Any) -> "Index":
        return self


def with_constants(name: str) -> Callable[[Index, Any], Any]:
    operation = getattr(int, name)

    def compute(self: Index, other: Any) -> Any:
        result = operation(self, getattr(other, "value", other))
        return Index(result) if type(result) is int else result

    return compute


for operator in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod"):
    setattr(Index, f"__{operator}__", with_constants(f"__{operator}__"))


def index_range(*bounds: Any) -> Iterator[Index]:
    numbers = [each.handle.data.item() if hasattr(each, "handle") else each for each in bounds]
    return (Index(index) for index in range(*map(int, numbers)))


def loop_of_tasks(start: Any, end: Any = None, step: Any = 1) -> Iterator[Index]:
    """`tl.range`, also with bounds that a kernel computed."""
    return index_range(0, start, step) if end is None else index_range(start, end, step)


def interpret() -> None:
    """Make the kernels run in the interpreter: without measuring configurations, with loops over its own numbers."""
    from triton.runtime import autotuner, interpreter

    def first(*_: Any, **__: Any) -> list[float]:
        return [1.0]

    autotuner.Autotuner._bench = first
    importlib.import_module("fla.modules.causal_conv1d")
    importlib.import_module("fla.ops.gated_delta_rule")
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            module.range = index_range  # type: ignore[attr-defined]
            if (prepare := vars(module).get("prepare_chunk_indices")) is not None:
                vars(module)["prepare_chunk_indices"] = recorded(prepare, name)
    interpreter.range = loop_of_tasks


COPYING: set[str] = set()  # modules that made a table of chunks, which is copied to the device while the host waits


def recorded(prepare: Callable[..., Tensor], module: str) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        COPYING.add(module)
        return prepare(*args, **kwargs)

    return call


def errors(dtype: torch.dtype, device: str) -> dict[str, list[float]]:
    """Return the errors of output and gradients, of the convolution and of the delta rule."""
    generator = torch.Generator().manual_seed(0)
    tokens = BOUNDARIES[-1]

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    channels = (random(1, tokens, CHANNELS), random(CHANNELS, KERNEL, dtype=torch.float32))
    found = {"convolution": compared(FLA_KERNELS.convolve, DOUBLE.convolve, channels)}
    for name, (keys, values, width) in HEADS.items():
        heads = [random(1, tokens, count, width) for count in (keys, keys, values)]
        decay = (-torch.rand(1, tokens, values, generator=generator)).to(device).requires_grad_()
        beta = torch.rand(1, tokens, values, generator=generator).to(device, dtype).requires_grad_()
        found[name] = compared(FLA_KERNELS.delta_rule, DOUBLE.delta_rule, (*heads, decay, beta))
    return found


def compared(kernel: Any, double: Any, inputs: Sequence[Tensor]) -> list[float]:
    packing = Packing.of(BOUNDARIES, inputs[0].device)
    bounds = (packing.cu_seqlens, packing.host_cu_seqlens, packing.chunk_indices)
    found, expected = (each(*inputs, *bounds) for each in (kernel, double))
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
    ours, theirs = (torch.autograd.grad(out, inputs, weight) for out in (found, expected))
    pairs = [(found, expected), *zip(ours, theirs, strict=True)]
    return [((one.double() - other.double()).norm() / other.double().norm()).item() for one, other in pairs]


class Selected(logging.Handler):
    """Collects what fla logs when it first calls a kernel of a backend: `operation -> backend`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        name, arrow, backend = record.getMessage().rpartition(" -> ")
        if arrow:
            self.kernels[name.rpartition(".")[2]] = backend


def main(device: str) -> None:
    torch.set_num_threads(1)
    npu = device == "npu"
    if npu:
        from tests.model import npu_interpreter

        npu_interpreter.pretend()
    interpret()
    if npu:
        npu_interpreter.accept_a_cpus_tensors()

    selected = Selected()
    logging.getLogger("fla").addHandler(selected)
    logging.getLogger("fla").setLevel(logging.INFO)
    json.dump(
        {"errors": errors(torch.float32, "cpu"), "kernels": selected.kernels, "copying": sorted(COPYING)}, sys.stdout
    )


if __name__ == "__main__":
    main(sys.argv[1])

"""Kernels of flash-linear-attention against their definition, in Triton's interpreter, which needs no device.

    TRITON_INTERPRET=1 python -m tests.model.interpreted_kernels

Prints the largest relative errors in float32: output and gradients of the convolution, then of the delta rule. (The
interpreter's matrix products of bfloat16 are wrong.) A sequence is longer than a chunk of 64 tokens, and one is shorter
than the convolution.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from app.device.cuda import KERNELS
from tests.model.linear_double import DOUBLE
from tests.model.support import relative

BOUNDARIES = (0, 5, 75, 77)
HEADS, WIDTH, CHANNELS, KERNEL = 2, 16, 24, 4


class Index(int):
    """A loop's variable, as Triton's compiler makes it."""

    def to(self, _: Any) -> "Index":
        return self


def index_range(*bounds: Any) -> Iterator[Index]:
    return (Index(index) for index in range(*map(int, bounds)))


def interpret() -> None:
    """Make the kernels run in the interpreter: without measuring configurations, with loops over its own numbers."""
    from triton.runtime import autotuner

    def first(*_: Any, **__: Any) -> list[float]:
        return [1.0]

    autotuner.Autotuner._bench = first
    importlib.import_module("fla.modules.causal_conv1d")
    importlib.import_module("fla.ops.gated_delta_rule")
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            module.range = index_range  # type: ignore[attr-defined]


def errors(dtype: torch.dtype, device: str) -> list[float]:
    """Return the errors of output and gradients, of the convolution and of the delta rule."""
    generator = torch.Generator().manual_seed(0)
    tokens = BOUNDARIES[-1]

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    channels = (random(1, tokens, CHANNELS), random(CHANNELS, KERNEL, dtype=torch.float32))
    heads = [random(1, tokens, HEADS, WIDTH) for _ in range(3)]
    decay = (-torch.rand(1, tokens, HEADS, generator=generator)).to(device).requires_grad_()
    beta = torch.rand(1, tokens, HEADS, generator=generator).to(device, dtype).requires_grad_()
    return [
        *compared(KERNELS.convolve, DOUBLE.convolve, channels),
        *compared(KERNELS.delta_rule, DOUBLE.delta_rule, (*heads, decay, beta)),
    ]


def compared(kernel: Callable[..., Tensor], double: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[float]:
    ends = torch.tensor(BOUNDARIES, dtype=torch.int32)
    found, expected = (each(*inputs, ends.to(inputs[0].device), ends) for each in (kernel, double))
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
    ours, theirs = (torch.autograd.grad(out, inputs, weight) for out in (found, expected))
    pairs = [(found, expected), *zip(ours, theirs, strict=True)]
    return [relative(one.detach().float(), other.detach().float()) for one, other in pairs]


if __name__ == "__main__":
    interpret()
    sys.stdout.write(" ".join(f"{error:.3g}" for error in errors(torch.float32, "cpu")) + "\n")

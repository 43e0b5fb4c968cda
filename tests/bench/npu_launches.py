"""The Triton kernels that fla-core launches on an NPU at real size, and the bytes of their tensors. None of them runs.

    pip install --no-deps --target /tmp/fla fla-core==0.6.0
    PYTHONPATH=/tmp/fla TRITON_INTERPRET=1 python -m tests.bench.npu_launches

Prints JSON: launches and bytes of the convolution and of the delta rule of Qwen3.5-9B over 8,192 tokens, forward and
backward, as fla's own Python makes them for triton-ascend. Torch's operators between them count as kernels, too, but
not those on boundaries and indices alone.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.bench.kernel_counts import KernelCounts, bytes_of
from tests.model import npu_interpreter

TOKENS, CHUNK = 8192, 64
KEY_HEADS, VALUE_HEADS, WIDTH, KERNEL = 16, 32, 128, 4
SMALLEST = 1024  # elements: what computes boundaries and chunks runs on the host, for the most part
CORES = {"num_aicore": 24, "num_vectorcore": 48}  # of an Atlas A2; they size the grids


@contextmanager
def launches(counts: KernelCounts) -> Iterator[None]:
    """Count the launches of Triton kernels instead of running them."""
    from triton.runtime import autotuner, interpreter

    def launch(self: Any, *given: Any, **named: Any) -> None:
        tensors = {id(each): each for each in (*given, *named.values()) if isinstance(each, Tensor)}
        counts.add(self.fn.__name__, sum(map(bytes_of, tensors.values())))

    def first(*_: Any, **__: Any) -> list[float]:
        return [1.0]

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", launch),
        mock.patch.object(autotuner.Autotuner, "_bench", first),
    ):
        yield


def counted(kernel: Any, inputs: list[Tensor]) -> dict[str, dict[str, Any]]:
    ends = torch.tensor([0, TOKENS], dtype=torch.int32)
    chunks = torch.tensor([[0, index] for index in range(TOKENS // CHUNK)], dtype=torch.int32)
    bounds = (ends, ends, chunks)[: kernel.__code__.co_argcount - len(inputs)]
    with KernelCounts(smallest=SMALLEST) as forward, launches(forward):
        out = kernel(*inputs, *bounds)
    with KernelCounts(smallest=SMALLEST) as backward, launches(backward):
        torch.autograd.grad(out, inputs, torch.empty_like(out))
    return {"forward": forward.found(), "backward": backward.found()}


def main() -> None:
    from app.config.device import DeviceKind
    from app.device import device_of

    npu_interpreter.CORES.update(CORES)
    npu_interpreter.pretend()
    npu_interpreter.accept_a_cpus_tensors()
    kernels: Any = device_of(DeviceKind.cuda).linear_kernels

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype).requires_grad_()

    # The rule takes parts of the convolution's output.
    widths = [count * WIDTH for count in (KEY_HEADS, KEY_HEADS, VALUE_HEADS)]
    heads = [part.unflatten(-1, (-1, WIDTH)) for part in tensor(1, TOKENS, sum(widths)).split(widths, dim=-1)]
    gates = [tensor(1, TOKENS, VALUE_HEADS, dtype=torch.float32), tensor(1, TOKENS, VALUE_HEADS)]
    found = {
        "convolution": counted(kernels.convolve, [tensor(1, TOKENS, sum(widths)), tensor(sum(widths), KERNEL)]),
        "delta rule": counted(kernels.delta_rule, [*heads, *gates]),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

"""How a policy computes on its device: its own attention, the size of the LM head's chunks, compiled parts.

Compiled are the parts that eager torch computes in many passes over memory: the norms, the MLPs with their activation,
and what the LM head computes from a chunk's logits. Each of them takes tensors only, so that packed sequences of any
lengths share one graph per shape of the model. FSDP2's hooks stay outside: they run around `forward`, which is what is
compiled.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from app.config.trainer import Compile
from app.device import Device
from app.device.base import LinearKernels
from app.model.attention import VarlenKernel

NORM = "RMSNorm"
MLP = "MLP"
# Graphs of one function: the norms of a class share theirs, and differ in rank, strides, gradients and FSDP's classes.
# Above the limit torch computes eagerly, and a recomputation may take another way than its forward pass.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a policy computes."""

    attention: VarlenKernel | None = None  # the device's own over packed sequences; None: torch's
    linear: LinearKernels | None = None  # the device's own of linear attention; None: transformers' reference
    head_chunk: int = 2**21  # logits that the LM head computes at once
    head_vocabulary: int | None = 1024  # entries of the vocabulary among them, at most; None: all
    compiled: bool = False  # whether torch compiles the norms, the MLPs and the head's loss


CPU_KERNELS = Kernels()


def chunk_shape(kernels: Kernels, vocabulary: int) -> tuple[int, int]:
    """Return the tokens and the entries of the vocabulary of one chunk of the LM head."""
    columns = min(vocabulary, kernels.head_vocabulary or vocabulary)
    return max(1, kernels.head_chunk // columns), columns


def kernels_of(device: Device, compiled: Compile) -> Kernels:
    """Return a device's kernels, with `trainer.compile`."""
    compiles = device.compiles if compiled is Compile.auto else compiled is Compile.on
    linear = None if device.loops_linear_attention() else device.linear_kernels
    return Kernels(device.attention_kernel, linear, device.head_chunk, device.head_vocabulary, compiles)


def compile_elementwise(decoder: nn.Module) -> None:
    """Compile the norms and MLPs of a decoder. Modules of one class share their graphs."""
    for module in decoder.modules():
        if type(module).__name__.endswith((NORM, MLP)):
            module.forward = _compiled(module.forward)


@cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, for any number of rows."""
    return _compiled(function)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, with room for the graphs of every caller."""
    # A device's backward pass recomputes in a thread of its own, where torch from 2.13 on reads the configuration's
    # defaults: the limit is an argument. Older versions have none, and one configuration for all threads.
    compiler: Callable[..., Any] = torch.compile  # its overloads leave the argument out
    if "recompile_limit" in inspect.signature(compiler).parameters:
        return compiler(function, dynamic=True, recompile_limit=RECOMPILE_LIMIT)
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    return compiler(function, dynamic=True)

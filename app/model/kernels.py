"""Kernels of a policy on its device: its own attention, the size of the LM head's chunks, compiled parts.

torch compiles the parts that it otherwise computes in many passes over memory: the norms, the gates of the MLPs, and
the LM head's loss of a chunk's logits. Each of them takes tensors only, so that packed sequences of any lengths share
one graph per shape of the model. FSDP2's hooks stay outside: they run around `forward`, which is what is compiled.

A device that does not compile may have fused operators for the same parts and for rotary embeddings. What is compiled
is not fused.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from app.config.trainer import Compile
from app.device import Device
from app.device.base import Elementwise, LinearKernels
from app.model.attention import SILU, VarlenKernel

NORM, GATED_NORM = "RMSNorm", "RMSNormGated"
MLP = "MLP"
# Families whose modules fused operators replace: what they compute is the same in transformers 5.12 to 5.23.
FUSED_FAMILIES = tuple(
    f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen2", "qwen3", "qwen3_5")
)
ZERO_CENTERED = "Qwen3_5RMSNorm"  # scales by 1 + weight
ROTARY = "apply_rotary_pos_emb"
# Graphs of one function: the norms of a class share theirs, and differ in rank, strides, gradients and FSDP's classes.
# Above the limit torch computes eagerly, and a recomputation may take another way than its forward pass.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels and chunk sizes of a policy."""

    attention: VarlenKernel | None = None  # the device's own over packed sequences; None: torch's
    linear: LinearKernels | None = None  # the device's own of linear attention; None: transformers' reference
    head_chunk: int = 2**21  # logits that the LM head computes at once
    head_vocabulary: int | None = 1024  # entries of the vocabulary among them, at most; None: all
    compiled: bool = False  # whether torch compiles the norms, the MLPs' gates and the head's loss
    elementwise: Elementwise | None = None  # the device's own operators for norms, MLPs and rotary embeddings


CPU_KERNELS = Kernels()


def chunk_shape(kernels: Kernels, vocabulary: int) -> tuple[int, int]:
    """Return the tokens and the entries of the vocabulary of one chunk of the LM head."""
    columns = min(vocabulary, kernels.head_vocabulary or vocabulary)
    return max(1, kernels.head_chunk // columns), columns


def kernels_of(device: Device, compiled: Compile) -> Kernels:
    """Return a device's kernels, with `trainer.compile`."""
    compiles = device.compiles if compiled is Compile.auto else compiled is Compile.on
    linear = None if device.loops_linear_attention() else device.linear_kernels
    return Kernels(
        attention=device.attention_kernel,
        linear=linear,
        head_chunk=device.head_chunk,
        head_vocabulary=device.head_vocabulary,
        compiled=compiles,
        elementwise=None if compiles else device.elementwise,
    )


def compile_elementwise(decoder: nn.Module) -> None:
    """Compile the norms of a decoder and the gates of its MLPs. Modules of one class share their graphs.

    Products inside of a graph are recomputed whatever is kept, as those of families whose whole MLPs are compiled.
    """
    for module in decoder.modules():
        name = type(module).__name__
        fused = type(module).__module__.startswith("fla.")  # a kernel already, in some versions of transformers
        if name.endswith((NORM, GATED_NORM)) and not fused:
            module.forward = _compiled(module.forward)
        elif name.endswith(MLP) and type(module).__module__ in FUSED_FAMILIES:
            _compile_gate(module)
        elif name.endswith(MLP) and not fused:
            module.forward = _compiled(module.forward)


def _compile_gate(mlp: Any) -> None:
    gate = _compiled(MethodType(_gate, mlp))  # a method, since each closure would have graphs of its own

    def forward(hidden: Tensor) -> Tensor:
        return mlp.down_proj(gate(mlp.gate_proj(hidden), mlp.up_proj(hidden)))

    mlp.forward = forward


def _gate(mlp: Any, gated: Tensor, up: Tensor) -> Tensor:
    product: Tensor = mlp.act_fn(gated) * up
    return product


def fuse_elementwise(decoder: Any, fused: Elementwise) -> None:
    """Let fused operators compute the norms, MLPs and rotary embeddings of a decoder. Parameters stay where they are.

    Modules of other families than `FUSED_FAMILIES`, and MLPs of another activation than SiLU, keep their own forward.
    """
    for module in decoder.modules():
        name = type(module).__name__
        if type(module).__module__ not in FUSED_FAMILIES:
            continue
        if name.endswith(GATED_NORM):
            _fuse_gated_norm(module, fused)
        elif name.endswith(NORM):
            _fuse_norm(module, fused, zero_centered=name == ZERO_CENTERED)
        elif name.endswith(MLP) and decoder.config.hidden_act in SILU:
            _fuse_mlp(module, fused)
        elif name.endswith("Attention"):
            _fuse_rotary(module, fused)


def _fuse_norm(norm: Any, fused: Elementwise, *, zero_centered: bool) -> None:
    def forward(hidden: Tensor) -> Tensor:
        return fused.rms_norm(hidden, norm.weight.to(hidden.dtype), norm.variance_epsilon)

    def forward_zero_centered(hidden: Tensor) -> Tensor:
        # The operator takes one dtype, and 1 + weight in bfloat16 would round most of the weight away.
        return fused.rms_norm(hidden.float(), 1.0 + norm.weight.float(), norm.eps).to(hidden.dtype)

    norm.forward = forward_zero_centered if zero_centered else forward


def _fuse_gated_norm(norm: Any, fused: Elementwise) -> None:
    def forward(hidden: Tensor, gate: Tensor) -> Tensor:
        normed = fused.rms_norm(hidden, norm.weight.to(hidden.dtype), norm.variance_epsilon)
        return fused.swiglu(torch.cat((gate, normed), dim=-1))  # SiLU(gate) · normed

    norm.forward = forward


def _fuse_mlp(mlp: Any, fused: Elementwise) -> None:
    def forward(hidden: Tensor) -> Tensor:
        return mlp.down_proj(fused.swiglu(torch.cat((mlp.gate_proj(hidden), mlp.up_proj(hidden)), dim=-1)))

    mlp.forward = forward


def _fuse_rotary(attention: Any, fused: Elementwise) -> None:
    def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        # By token, as the attention kernel takes it: by head, it would have to copy queries and keys.
        by_token, width = heads.transpose(1, 2), cosines.shape[-1]
        angles = (cosines.unsqueeze(2), sines.unsqueeze(2))
        if width == heads.shape[-1]:
            return fused.rotate(by_token, *angles).transpose(1, 2)
        turning, still = by_token.split((width, heads.shape[-1] - width), dim=-1)
        return torch.cat((fused.rotate(turning, *angles), still), dim=-1).transpose(1, 2)

    def apply(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(query, cosines, sines), rotated(key, cosines, sines)

    # transformers looks the function up in its module, which the other models of the process share. So this module's
    # forward is the same code with names of its own.
    forward = inspect.unwrap(type(attention).forward)
    names = {**forward.__globals__, ROTARY: apply}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    attention.forward = MethodType(own, attention)


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

"""Kernels of a policy on its device: its own attention, the size of the LM head's chunks, compiled parts.

torch compiles the parts that it otherwise computes in many passes over memory: the norms, the gates of the MLPs, the
rotary embeddings with the norms of queries and keys, the output gate of attention, and the LM head's loss of a chunk's
logits. Each of them takes tensors only, so that packed sequences of any lengths share one graph per shape of the model.
FSDP2's hooks stay outside: they run around a module's `forward`, and what is compiled is in it.

A device that does not compile may have fused operators for norms, MLPs and rotary embeddings. What is compiled is not
fused.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from app.config.trainer import Compile
from app.device import Device
from app.device.base import Elementwise, LinearKernels
from app.model.attention import SILU, VarlenKernel, packed

NORM, GATED_NORM = "RMSNorm", "RMSNormGated"
MLP = "MLP"
ATTENTION = "Attention"
# Families whose MLPs and attention have a forward of ours: what they compute is the same in transformers 5.12 to 5.23.
FUSED_FAMILIES = tuple(
    f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen2", "qwen3", "qwen3_5")
)
ZERO_CENTERED = "Qwen3_5RMSNorm"  # scales by 1 + weight
OUTPUT_GATED = "Qwen3_5Attention"  # its queries' projection has a gate beside each query
# Graphs of one function: the norms of a class share theirs, and differ in rank, strides, gradients and FSDP's classes.
# Above the limit torch computes eagerly, and a recomputation may take another way than its forward pass.
RECOMPILE_LIMIT = 64
COMPILED_BYTES = 8  # of a compiled head's chunk for each of its `head_chunk` logits


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels and chunk sizes of a policy."""

    attention: VarlenKernel | None = None  # the device's own over packed sequences; None: torch's
    linear: LinearKernels | None = None  # the device's own of linear attention; None: transformers' reference
    head_chunk: int = 2**21  # logits that the LM head computes at once
    head_vocabulary: int | None = 1024  # entries of the vocabulary among them, at most; None: all
    compiled: bool = False  # whether torch compiles what is elementwise, norms and the head's loss
    elementwise: Elementwise | None = None  # the device's own operators for norms, MLPs and rotary embeddings


CPU_KERNELS = Kernels()


def chunk_shape(kernels: Kernels, head: Tensor) -> tuple[int, int]:
    """Return the tokens and the entries of the vocabulary of one chunk of an LM head [V, D].

    Each chunk of tokens reads and writes the head's gradient once. Compiled, the products of a chunk are its only
    tensor: in eight bytes a logit, fewer than the float32 tensors would have, a chunk has four times the tokens.
    """
    columns = min(len(head), kernels.head_vocabulary or len(head))
    alone = kernels.compiled and kernels.head_vocabulary is None
    chunk = kernels.head_chunk * (COMPILED_BYTES // head.element_size() if alone else 1)
    return max(1, chunk // columns), columns


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
    """Compile the elementwise parts and norms of a decoder. Modules of one class share their graphs.

    Products inside of a graph are recomputed whatever is kept, as those of families whose whole MLPs are compiled.
    """
    inner: set[nn.Module] = set()  # norms of queries and keys, which are in the graph of the rotary embeddings
    for module in decoder.modules():
        name = type(module).__name__
        known = type(module).__module__ in FUSED_FAMILIES
        fused = type(module).__module__.startswith("fla.")  # a kernel already, in some versions of transformers
        if module in inner:
            continue
        if name.endswith((NORM, GATED_NORM)) and not fused:
            module.forward = _compiled(module.forward)
        elif name.endswith(ATTENTION) and known:
            _replace_attention(module, _compiled(MethodType(_normed_and_rotated, module)), compiled_once(_gated))
            inner.update(module.children())
        elif name.endswith(MLP) and known:
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
        elif name.endswith(ATTENTION):
            _replace_attention(module, partial(_normed_and_rotated, module, rotate=fused.rotate), _gated)


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


def _replace_attention(attention: Any, rotated: Callable[..., Any], gated: Callable[..., Any]) -> None:
    """Let these functions compute what is around the attention of a module.

    Queries and keys stay [1, T, heads, D], as kernels of attention take them: by head they would be copied.
    """

    def forward(
        hidden_states: Tensor,  # [1, T, C]
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        width = attention.head_dim
        gate: Tensor | None = None
        query = attention.q_proj(hidden_states).unflatten(-1, (-1, parts * width))
        key, value = (each(hidden_states).unflatten(-1, (-1, width)) for each in (attention.k_proj, attention.v_proj))
        if parts == 2:
            query, gate = query.chunk(2, dim=-1)

        query, key = rotated(query, key, *position_embeddings)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        options |= {"scaling": attention.scaling, "sliding_window": getattr(attention, "sliding_window", None)}
        mixed, _ = packed(attention, query, key, value, attention_mask, **options)
        if gate is not None:
            mixed = gated(mixed, gate)

        return attention.o_proj(mixed.flatten(2)), None

    parts = 1 + (type(attention).__name__ == OUTPUT_GATED)
    attention.forward = forward


def _by_halves(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding in torch."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def _normed_and_rotated(
    attention: Any,
    query: Tensor,  # [1, T, H, D]
    key: Tensor,  # [1, T, K, D]
    cosines: Tensor,  # [1, T, R] for the first R channels of each head
    sines: Tensor,  # [1, T, R]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = _by_halves,
) -> tuple[Tensor, ...]:
    """Normalize queries and keys if the model does, and apply rotary embeddings to them."""
    if hasattr(attention, "q_norm"):
        query = attention.q_norm(query)
        key = attention.k_norm(key)

    width = cosines.shape[-1]
    angles = cosines.unsqueeze(2), sines.unsqueeze(2)
    found = []
    for heads in (query, key):
        if width == heads.shape[-1]:
            found.append(rotate(heads, *angles))
            continue
        turning, still = heads.split((width, heads.shape[-1] - width), dim=-1)
        found.append(torch.cat((rotate(turning, *angles), still), dim=-1))
    return tuple(found)


def _gated(mixed: Tensor, gate: Tensor) -> Tensor:
    return mixed * torch.sigmoid(gate)


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

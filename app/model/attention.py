"""Attention over packed sequences, registered as `packed` in transformers' `AttentionInterface`.

Full attention, in 16 bits on an accelerator: a kernel that takes the sequence boundaries directly, the device's own
(`Device.attention_kernel`) or torch's varlen kernel. Otherwise torch's causal scaled-dot-product attention on padded
buckets of similar length, which is exact on every device and dtype, and the fastest on a CPU.

Linear attention (Qwen3.5's gated delta-nets): neither convolution nor state crosses a boundary. A device's kernels take
packed tokens with their boundaries; otherwise torch's convolution and the reference of transformers run on the buckets.
A kernel is tried when a model is loaded: one that fails, or differs from torch, is replaced alone.
"""

import inspect
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import accumulate
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, scaled_dot_product_attention, silu, softplus
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from app.device.base import LinearKernels
from app.device.torchvision_shim import transformers
from app.errors import one_line
from app.model.packing import Packing

log = logging.getLogger(__name__)
PACKED = "packed"
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
REFERENCE = "torch_chunk_gated_delta_rule"
SILU = ("silu", "swish")
# A kernel of linear attention is tried on sequences of these lengths. The tolerance is relative to the norm of each
# sequence, where bfloat16 costs a gradient 0.005; of single values it costs twice as much.
LENGTHS = (70, 33, 153, 3840)
TOLERANCE = 0.02
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
# query [T, H, D], key and value [T, K, D], sequence boundaries, scale → [T, H, D]
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Sequence[int], float], Tensor]


class _Recomputation(threading.local):
    """How the thread that computes a layer enters `kept_operators`; None: nothing is kept."""

    enter: Callable[[], AbstractContextManager[Any]] | None = None


_recomputation = _Recomputation()


def recomputing(policy: Callable[..., Any]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a layer's forward pass and of its recomputation, a `context_fn` of torch's `checkpoint`.

    Torch's own would see every operator of a layer in Python, which takes the host more than twice the time. So each
    block of `kept_operators` has contexts of its own, and nothing is seen between the blocks.
    """
    replays: deque[AbstractContextManager[Any]] = deque()

    def save() -> AbstractContextManager[Any]:
        saving, replaying = create_selective_checkpoint_contexts(policy)
        replays.append(replaying)
        return saving

    return _entering(save), _entering(replays.popleft)


@contextmanager
def _entering(enter: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    before, _recomputation.enter = _recomputation.enter, enter
    try:
        yield
    finally:
        _recomputation.enter = before


def kept_operators() -> AbstractContextManager[Any]:
    """Return the context of operators whose results a recomputed layer may keep, in the order of its forward pass."""
    return nullcontext() if _recomputation.enter is None else _recomputation.enter()


@cache
def register_packed() -> None:
    """Register `packed` with transformers.

    It has no mask function: the sequence boundaries replace the mask, and transformers would read the positions from
    the device to look for sequences.
    """
    transformers().AttentionInterface.register(PACKED, packed)


def packed(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    attention_kernel: VarlenKernel | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,  # further arguments that transformers passes to every implementation
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence: [1, T, H, D].

    Raises:
        ValueError: If a sequence is longer than the model's sliding window, or the model caps its attention scores
            (`softcap`) or has attention sinks (`s_aux`), none of which is supported.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{PACKED} attention neither caps scores (softcap) nor has attention sinks (s_aux)")
    if sliding_window is not None and sliding_window < packing.longest:
        raise ValueError(
            f"{PACKED} attention has no sliding window: the window is {sliding_window} tokens, "
            f"the longest sequence {packing.longest}"
        )

    if query.device.type != "cpu" and query.dtype in VARLEN_DTYPES:
        if attention_kernel is not None:
            q, k, v = (packing.write_out(_by_token(tensor)) for tensor in (query, key, value))
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            with kept_operators():
                out = attention_kernel(q, k, v, packing.boundaries, scale)
            return packing.take_back(out).unsqueeze(0), None
        if (kernel := varlen_kernel()) is not None:
            return varlen(kernel, query, key, value, packing, scaling).unsqueeze(0), None

    heads = query.shape[1]
    mixed = []
    padded = (packing.pad(tensor.squeeze(0).transpose(0, 1)) for tensor in (query, key, value))
    for bucket in zip(*padded, strict=True):
        q, k, v = (tensor.transpose(1, 2) for tensor in bucket)  # [B, heads, L, D]
        k, v = _repeat(k, heads), _repeat(v, heads)
        with kept_operators():
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        mixed.append(out.transpose(1, 2))
    return packing.unpad(mixed).unsqueeze(0), None


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return torch's varlen attention, or None if this torch does not have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def varlen(
    kernel: Callable[..., Any],
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    packing: Packing,
    scaling: float | None,
) -> Tensor:
    """Causal attention with the varlen kernel: [T, H, D].

    The kernel's first version had no window, scale or grouped heads, so its signature decides which arguments it gets.
    """
    accepted = inspect.signature(kernel).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    if "scale" in accepted:
        options["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * sqrt(query.shape[3]))

    if "enable_gqa" in accepted:
        options["enable_gqa"] = True
    else:
        key, value = _repeat(key, query.shape[1]), _repeat(value, query.shape[1])

    q, k, v = (packing.write_out(_by_token(tensor)) for tensor in (query, key, value))
    boundaries = packing.cu_seqlens
    with kept_operators():
        out = kernel(q, k, v, boundaries, boundaries, packing.longest, packing.longest, **options)
    return packing.take_back(out)


def mix_packed(mixer: nn.Module, kernels: LinearKernels | None) -> None:
    """Make a linear-attention module process packed sequences. Its parameters are unchanged."""
    if _is_gated_delta_net(mixer):
        _replace_forward(mixer, kernels or LinearKernels())
    else:
        _isolate_sequences(mixer)


def _is_gated_delta_net(mixer: Any) -> bool:
    known = all(hasattr(mixer, name) for name in PROJECTIONS) and getattr(mixer, "activation", None) in SILU
    return known and mixer.conv1d.bias is None and hasattr(sys.modules[type(mixer).__module__], REFERENCE)


def _replace_forward(mixer: Any, kernels: LinearKernels) -> None:
    def forward(hidden_states: Tensor, *, packing: Packing, **_: Any) -> Tensor:
        qkv = mixer.in_proj_qkv(hidden_states)
        gate = mixer.in_proj_z(hidden_states)
        beta = mixer.in_proj_b(hidden_states).sigmoid()
        steps = softplus(mixer.in_proj_a(hidden_states).float() + mixer.dt_bias)
        decay = -mixer.A_log.float().exp() * steps
        mixed = _mix(mixer, kernels, packing, mixer.conv1d.weight, qkv, decay, beta)

        # The gated norm is over the channels of a head.
        width = mixer.head_v_dim
        normed = mixer.norm(mixed.reshape(-1, width), gate.reshape(-1, width))
        return mixer.out_proj(normed.reshape(gate.shape))

    mixer.forward = forward


def _mix(
    mixer: Any, kernels: LinearKernels, packing: Packing, weight: Tensor, qkv: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """Convolution and delta rule within each sequence: [1, T, value heads, value width].

    A kernel takes the sequences end to end. Without one, torch computes padded buckets.
    """
    convolve, delta_rule = kernels.convolve, kernels.delta_rule
    bounds = () if kernels == LinearKernels() else (packing.cu_seqlens, packing.host_cu_seqlens, packing.chunk_indices)
    parts = _spread(packing, qkv, convolve)
    if convolve is None:
        parts = [_convolve(weight, part) for part in parts]
    else:
        parts = [convolve(part, weight.squeeze(1), *bounds) for part in parts]

    if (convolve is None) != (delta_rule is None):
        parts = _spread(packing, _collect(packing, parts, convolve), delta_rule)
    inputs = zip(parts, _spread(packing, decay, delta_rule), _spread(packing, beta, delta_rule), strict=True)
    if delta_rule is None:
        mixed = [_loop(mixer, *each) for each in inputs]
    else:
        mixed = [delta_rule(*_heads(mixer, part), decays, betas, *bounds) for part, decays, betas in inputs]
    return _collect(packing, mixed, delta_rule)


def _spread(packing: Packing, packed: Tensor, kernel: object | None) -> list[Tensor]:
    """[1, T, …] → one [1, E, …] for a kernel, else one [B, L, …] per bucket."""
    tokens = packed.squeeze(0)
    return packing.pad(tokens) if kernel is None else [packing.write_out(tokens).unsqueeze(0)]


def _collect(packing: Packing, parts: list[Tensor], kernel: object | None) -> Tensor:
    """The inverse of `_spread`: [1, T, …]."""
    tokens = packing.unpad(parts) if kernel is None else packing.take_back(parts[0].squeeze(0))
    return tokens.unsqueeze(0)


def _convolve(weight: Tensor, channels: Tensor) -> Tensor:
    """The causal convolution of [B, L, C] with its activation, in the weight's dtype."""
    length, pad = channels.shape[1], weight.shape[2] - 1
    out = conv1d(channels.transpose(1, 2).to(weight.dtype), weight, padding=pad, groups=weight.shape[0])
    return silu(out[:, :, :length]).to(channels.dtype).transpose(1, 2)


def _loop(mixer: Any, channels: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The delta rule in torch, which needs as many queries and keys as values."""
    # Behind the decorator: with fla installed, transformers would call its kernels for tensors on a CPU, too.
    reference = inspect.unwrap(getattr(sys.modules[type(mixer).__module__], REFERENCE))
    heads = _heads(mixer, channels, mixer.num_v_heads // mixer.num_k_heads)
    return reference(*heads, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def _heads(mixer: Any, channels: Tensor, repeats: int = 1) -> tuple[Tensor, ...]:
    """[B, L, C] → query and key [B, L, key heads · repeats, key width], and value [B, L, value heads, value width]."""
    widths = (mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim)
    parts = channels.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True))
    if repeats > 1:
        query, key = (tensor.repeat_interleave(repeats, dim=2) for tensor in (query, key))
    return query, key, value


def working_kernels(
    kernels: LinearKernels, decoder: nn.Module, device: torch.device | str, dtype: torch.dtype
) -> LinearKernels:
    """Return these kernels without those that fail on this device, or differ from torch, at the sizes of a decoder.

    fla chooses tiles by channels and tokens, and its convolution's backward pass has exceeded the memory of a core of
    an Atlas A3 (Megatron-LM-FL, pull request 153): so there are about as many tokens as in a microbatch, for which the
    first call also tunes the kernels. A kernel that does not work costs its operator alone.
    """
    mixer = next((module for module in decoder.modules() if _is_gated_delta_net(module)), None)
    if mixer is None:
        return kernels
    expected = _trial(mixer, LinearKernels(), device, dtype)

    def works(operator: str, alone: LinearKernels) -> bool:
        try:
            found = _trial(mixer, alone, device, dtype)
            errors = [((one - other).norm() / other.norm()).item() for one, other in zip(found, expected, strict=True)]
            if all(error <= TOLERANCE for error in errors):
                log.info("linear attention: %s in a kernel", operator)
                return True
            why = f"the kernel's relative error is {max(errors):.2g}"
        # Whatever a compiler or a driver raises: torch computes the same.
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error)}"
        log.warning("linear attention: %s in torch, far slower: %s", operator, why)
        return False

    if not works("the convolution", replace(kernels, delta_rule=None)):
        kernels = replace(kernels, convolve=None)
    if not works("the delta rule", replace(kernels, convolve=None)):
        kernels = replace(kernels, delta_rule=None)
    return kernels


def _trial(mixer: Any, kernels: LinearKernels, device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
    """Mix random sequences. Returns the output and the gradients of its inputs, those of tokens by sequence."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    tokens, heads, weight = sum(LENGTHS), mixer.num_v_heads, random(*mixer.conv1d.weight.shape)
    if kernels.convolve is None:
        weight = weight.float()  # a precaution: torch may sum its gradient in bfloat16
    qkv, beta = random(1, tokens, len(weight)), random(1, tokens, heads).sigmoid()
    decay = -random(1, tokens, heads).float().sigmoid()
    inputs = [each.requires_grad_() for each in (weight, qkv, decay, beta)]
    out = _mix(mixer, kernels, Packing.of([0, *accumulate(LENGTHS)], device), *inputs)
    of_weight, *of_tokens = torch.autograd.grad(out, inputs, random(*out.shape))
    by_sequence = [part for tensor in (out.detach(), *of_tokens) for part in tensor.float().split(LENGTHS, dim=1)]
    return [of_weight.float(), *by_sequence]


def _isolate_sequences(mixer: nn.Module) -> None:
    """Make any other linear-attention module process its packed input bucket by bucket."""
    forward: Callable[..., Tensor] = mixer.forward

    def per_bucket(hidden_states: Tensor, *, packing: Packing, **_: Any) -> Tensor:
        mixed = [forward(hidden_states=bucket) for bucket in packing.pad(hidden_states.squeeze(0))]
        return packing.unpad(mixed).unsqueeze(0)

    mixer.forward = per_bucket


def _repeat(grouped: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads: [B, K, L, D] → [B, H, L, D].

    As fast as torch's `enable_gqa` on a CPU, and supported by every kernel.
    """
    batch, kv_heads, length, width = grouped.shape
    if kv_heads == heads:
        return grouped
    repeated = grouped[:, :, None].expand(batch, kv_heads, heads // kv_heads, length, width)
    return repeated.reshape(batch, heads, length, width)


def _by_token(tensor: Tensor) -> Tensor:
    """[1, H, T, D] → contiguous [T, H, D]."""
    return tensor.squeeze(0).transpose(0, 1).contiguous()

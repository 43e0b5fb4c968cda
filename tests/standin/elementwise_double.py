"""torch_npu's fused elementwise operators where there is no NPU: by their definitions, in float64, rounded at the end.

Names, schemas and requirements are those of torch_npu 2.10.0.post7 (`tests/real_stack/npu.py` compares the schemas),
and gradients are operators of their own, as there. `DOUBLE` are the application's functions with these operators.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from app.device import npu
from app.device.base import Elementwise

SCHEMAS = {
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rms_norm_backward": "(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_swiglu_backward": "(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
    "npu_rotary_mul": ("(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor"),
    "npu_rotary_mul_backward": (
        "(Tensor grad, Tensor input, Tensor r1, Tensor r2, str rotary_mode='half') -> (Tensor, Tensor, Tensor)"
    ),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEADS, MAX_WIDTH = 1000, 896  # of npu_rotary_mul


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean x² + ε) · γ over the last dimension, and 1 / sqrt(mean x² + ε) in float32."""
    require_one_dtype(input, gamma)
    assert 2 <= input.dim() <= 8
    assert gamma.shape == input.shape[-1:]
    if input.is_meta:
        return torch.empty_like(input), input.new_empty(*input.shape[:-1], 1, dtype=torch.float32)
    x = input.double()
    norm = (x.square().sum(-1, keepdim=True) / x.shape[-1] + epsilon).sqrt()
    return (x / norm * gamma.double()).to(input.dtype), (1 / norm).float()


def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    if input.is_meta:
        return torch.empty_like(input), gamma.new_empty(gamma.shape, dtype=torch.float32)
    upstream, x, inverse = dy.double(), input.double(), rstd.double()
    scaled = upstream * gamma.double()
    along = (scaled * x).sum(-1, keepdim=True) * inverse**2 / x.shape[-1]  # Σ g·x / (C · norm²)
    dx = inverse * (scaled - along * x)
    dgamma = (upstream * x * inverse).flatten(0, -2).sum(0)
    return dx.to(input.dtype), dgamma.float()


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """A / (1 + exp(-A)) · B of the halves A and B."""
    require_one_dtype(input)
    if input.is_meta:
        return torch.empty_like(input.narrow(dim, 0, input.shape[dim] // 2))
    a, b = input.double().chunk(2, dim)
    return (a / (1 + (-a).exp()) * b).to(input.dtype)


def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    if input.is_meta:
        return torch.empty_like(input)
    upstream = grad_output.double()
    a, b = input.double().chunk(2, dim)
    gate = 1 / (1 + (-a).exp())
    slope = gate * (1 + a * (1 - gate))  # of A · gate
    return torch.cat((upstream * b * slope, upstream * a * gate), dim).to(input.dtype)


def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """x · r1 + turned(x) · r2, where turned has -x of the second half first, then x of the first half."""
    require_one_dtype(input, r1, r2)
    assert (rotary_mode, rotate) == ("half", None)
    assert input.dim() == r1.dim() == r2.dim() == 4
    assert input.shape[3] % 2 == 0
    assert input.shape[3] < MAX_WIDTH
    assert input.shape[2] < MAX_HEADS  # by token: [1, T, H, D] with [1, T, 1, D]
    assert r1.shape == r2.shape == (1, input.shape[1], 1, input.shape[3])
    if input.is_meta:
        return input.new_empty(input.shape)
    x, cosines, sines = input.double(), r1.double(), r2.double()
    half = x.shape[3] // 2
    out = x * cosines
    out[..., :half] -= x[..., half:] * sines[..., :half]
    out[..., half:] += x[..., :half] * sines[..., half:]
    return out.to(input.dtype)


def rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x. Those of cosines and sines, which nobody takes, are empty."""
    if input.is_meta:
        return input.new_empty(input.shape), torch.empty_like(r1), torch.empty_like(r2)
    upstream, cosines, sines = grad.double(), r1.double(), r2.double()
    half = upstream.shape[3] // 2
    dx = upstream * cosines
    dx[..., half:] -= upstream[..., :half] * sines[..., :half]
    dx[..., :half] += upstream[..., half:] * sines[..., half:]
    return dx.to(input.dtype), torch.empty_like(r1), torch.empty_like(r2)


def require_one_dtype(first: Tensor, *others: Tensor) -> None:
    assert first.dtype in DTYPES, first.dtype
    assert all(each.dtype == first.dtype for each in others), [first.dtype, *(each.dtype for each in others)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    kept = [output[1]] if isinstance(output, tuple) else []
    ctx.save_for_backward(*tensors, *kept)
    ctx.set_materialize_grads(False)  # of an output that nothing uses


def _of_rms_norm(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
    input, gamma, rstd = ctx.saved_tensors
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, input, gamma, rstd)
    return dx, dgamma.to(gamma.dtype), None


def _of_swiglu(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return torch.ops.npu.npu_swiglu_backward(dy, *ctx.saved_tensors), None


def _of_rotary_mul(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.npu.npu_rotary_mul_backward(dy, *ctx.saved_tensors)[0], None, None, None, None


KERNELS = {
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": swiglu_backward,
    "npu_rotary_mul": rotary_mul,
    "npu_rotary_mul_backward": rotary_mul_backward,
}
GRADIENTS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": _of_rms_norm,
    "npu_swiglu": _of_swiglu,
    "npu_rotary_mul": _of_rotary_mul,
}

LIBRARY = torch.library.Library("npu", "FRAGMENT")
for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    # The stand-in device runs the CPU's kernel on its own memory.
    for _key in ("CPU", "Meta"):
        LIBRARY.impl(_name, KERNELS[_name], _key)
for _name, _gradient in GRADIENTS.items():
    torch.library.register_autograd(f"npu::{_name}", _gradient, setup_context=_keep, lib=LIBRARY)


def _with_torch_npu(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of app/device/npu.py, for whose duration a module `torch_npu` has these operators alone.

    Not longer: transformers looks for torch_npu when its modules are imported, and would import more of it.
    """
    plugin = ModuleType("torch_npu")
    for name in GRADIENTS:
        setattr(plugin, name, getattr(torch.ops.npu, name))

    def run(*given: Any) -> Tensor:
        with mock.patch.dict(sys.modules, torch_npu=plugin):
            return function(*given)

    return run


DOUBLE = Elementwise(*(_with_torch_npu(function) for function in (npu.rms_norm, npu.swiglu, npu.rotate)))

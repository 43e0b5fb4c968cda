"""fla's kernels for Ascend NPUs in Triton's interpreter, on a machine without one.

fla asks Triton's driver for the device; the driver here answers as an NPU's, so that fla's own dispatch selects the
kernels of its `triton_ascend` backends. What triton-ascend has beyond Triton 3.7 is defined below. Not covered:
triton-ascend's compiler, the size of a core's memory, and bfloat16, whose products the interpreter gets wrong.
"""

import contextlib
import math
import os
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

CORES = {"num_aicore": 3, "num_vectorcore": 6}  # few: every core gets several tasks
UNIFIED_BUFFER_BITS = 192 * 1024 * 8


def pretend() -> None:
    """Before fla is imported: make Triton's driver an NPU's."""
    import triton
    from triton.runtime import driver

    target = SimpleNamespace(backend="npu", arch="Ascend910B2", warp_size=0)
    utils = SimpleNamespace(get_device_properties=lambda _: CORES | {"max_shared_mem": 196_608})
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, utils=utils, get_current_device=lambda: 0))

    module: Any = ModuleType("torch.npu")
    module.current_device = lambda: 0
    module.is_available = lambda: False
    module.device_count = lambda: 1
    module.device = lambda _: contextlib.nullcontext()
    torch.npu = module  # type: ignore[attr-defined]
    os.environ["ASCEND_UB_CAPACITY_BITS"] = str(UNIFIED_BUFFER_BITS)

    # The tensors are a CPU's.
    for name in ("custom_fwd", "custom_bwd"):
        setattr(torch.amp, name, on_a_cpu(getattr(torch.amp, name)))
    extend(triton.language)


def on_a_cpu(decorator: Any) -> Any:
    def decorate(function: Any = None, *, device_type: str, **options: Any) -> Any:
        return decorator(function, device_type="cpu", **options)

    return decorate


def extend(language: Any) -> None:
    """Add what triton-ascend's language has beyond Triton's."""
    from triton import _utils
    from triton.language import core, semantic
    from triton.runtime.interpreter import TensorHandle

    def number(value: Any) -> int:
        return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)

    def places(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
        bounds = zip(map(number, offsets), map(number, sizes), map(number, strides), strict=True)
        return tuple(slice(start, start + size * stride, stride) for start, size, stride in bounds)

    def extract_slice(tensor: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
        data = tensor.handle.data[places(offsets, sizes, strides)].copy()
        return language.tensor(
            TensorHandle(data, tensor.handle.dtype), language.block_type(tensor.dtype.scalar, list(data.shape))
        )

    def insert_slice(tensor: Any, part: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
        data = tensor.handle.data.copy()
        data[places(offsets, sizes, strides)] = part.handle.data
        return language.tensor(TensorHandle(data, tensor.handle.dtype), tensor.type)

    def arange(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
        kind = ret_ty or language.block_type(language.int32, [end - start])
        return self.tensor(self.builder.create_make_range(kind.to_ir(self.builder), start, end), kind)

    def elements(shape: Sequence[Any]) -> int:
        return math.prod(int(getattr(each, "value", each)) for each in shape)

    language.extract_slice, language.insert_slice = extract_slice, insert_slice
    # Blocks of any size, not of powers of two alone.
    semantic.TritonSemantic.arange = arange
    _utils.is_power_of_two = lambda _: True
    _utils.validate_block_shape = core.validate_block_shape = elements
    for name in ("tanh", "erf"):  # imported, and not called here
        if not hasattr(language.math, name):
            setattr(language.math, name, None)


def accept_a_cpus_tensors() -> None:
    """After fla is imported: two of its checks ask for the type of a tensor's device."""
    from fla.ops.common.backends.triton_ascend import TritonAscendCommonBackend
    from fla.ops.gated_delta_rule.backends.triton_ascend import TritonAscendGDNBackend
    from fla.utils import IS_NPU

    def accept(*_: Any, **__: Any) -> tuple[bool, None]:
        return True, None

    assert IS_NPU
    TritonAscendCommonBackend.chunk_scaled_dot_kkt_fwd_verifier = accept
    TritonAscendGDNBackend.recompute_w_u_fwd_verifier = accept

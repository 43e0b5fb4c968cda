"""Float32 matrix products on AMD's CPUs, computed by oneDNN.

torch gives float32 products to MKL, which uses AVX2 on CPUs that are not Intel's. oneDNN, which torch brings along for
bfloat16, has AVX-512 kernels for all of them: about twice as fast (`python -m tests.bench.matmul`). Both sides of a run
use it, so that the engine's log-probabilities stay the trainer's.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

MIN_MULTIPLICATIONS = 2**20  # multiplications, below which the call costs more than MKL's slower kernel
VENDOR = "AuthenticAMD"
CPU_DESCRIPTION = Path("/proc/cpuinfo")

_overrides: list[torch.library.Library] = []  # an override ends with its library


@cache
def use_onednn_matmul() -> bool:
    """Let oneDNN compute this process's large float32 products, those of backward passes too.

    Returns:
        False where it would not help: on other vendors' CPUs, without AVX-512, and in a torch without oneDNN.
    """
    if not onednn_is_faster():
        return False
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that an operator is overridden
        for name in OPERATORS:
            library.impl(name, _override(name), "CPU")
    _overrides.append(library)
    return True


def onednn_is_faster() -> bool:
    """Whether oneDNN's kernels are faster here than MKL's."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.library, "get_kernel")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and CPU_DESCRIPTION.exists()
        and VENDOR in CPU_DESCRIPTION.read_text(encoding="utf-8")
    )


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of a [M, K] and b [K, N], float32 of any strides."""
    if a.shape[1] != b.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)})")
    # oneDNN is slow in reading a left factor across its rows, as for a weight's gradient. It is copied, or the product
    # is transposed if that copies less: the other factor and the result.
    copied = b.numel() + a.shape[0] * b.shape[1]
    swapped = a.stride(1) != 1 and b.stride(1) == 1 and copied < a.numel()
    if swapped:
        a, b = b.t(), a.t()
    product = torch.ops.mkldnn._linear_pointwise(a.contiguous(), b.t(), None, "none", [], "")
    return product.t().contiguous() if swapped else product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias as torch's own `linear` would, bypassing its dispatcher.

    Args:
        x: [M, K].
        weight: [N, K].
        bias: [N].
    """
    if not _overrides or not _large(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


def _large(a: Tensor, b: Tensor, into: Tensor | None = None) -> bool:
    """Whether oneDNN is to compute a·b. An `into` of another shape is for torch to resize, broadcast or refuse."""
    if a.shape[0] * b.numel() < MIN_MULTIPLICATIONS or not a.dtype == b.dtype == torch.float32:
        return False
    return into is None or (into.dtype == torch.float32 and into.shape == (a.shape[0], b.shape[1]))


Before = Callable[..., Tensor]  # an operator's kernel from before the override


def _mm(before: Before, a: Tensor, b: Tensor) -> Tensor:
    return multiply(a, b) if _large(a, b) else before(a, b)


def _mm_out(before: Before, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(multiply(a, b)) if _large(a, b, out) else before(a, b, out=out)


def _addmm(before: Before, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute a linear layer with a bias."""
    plain = bias.dtype == a.dtype and bias.shape == b.shape[1:] and beta == alpha == 1
    return multiply(a, b).add_(bias) if plain and _large(a, b) else before(bias, a, b, beta=beta, alpha=alpha)


def _addmm_inplace(before: Before, total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not _large(a, b, total):
        return before(total, a, b, beta=beta, alpha=alpha)
    product = multiply(a, b)
    return total.copy_(product.mul_(alpha)) if beta == 0 else total.mul_(beta).add_(product, alpha=alpha)


OPERATORS: dict[str, Callable[..., Tensor]] = {"mm": _mm, "mm.out": _mm_out, "addmm": _addmm, "addmm_": _addmm_inplace}


def _override(name: str) -> Callable[..., Tensor]:
    """Return the replacement of one of torch's operators."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return partial(OPERATORS[name], partial(kernel.call_boxed, keys))

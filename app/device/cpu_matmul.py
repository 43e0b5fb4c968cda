"""Float32 matrix products on AMD's CPUs, computed by oneDNN.

torch gives float32 products to MKL, which uses AVX2 on CPUs that are not Intel's. oneDNN, which torch brings along and
uses for bfloat16, has AVX-512 kernels for all of them: about twice as fast (`python -m tests.bench.matmul`). Both sides
of a run use it, so that the engine's log-probabilities stay the trainer's.
"""

import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LEAST = 2**20  # multiplications, below which the call costs more than MKL's slower kernel
VENDOR = "AuthenticAMD"
CPU_DESCRIPTION = Path("/proc/cpuinfo")


@cache
def use_onednn_matmul() -> bool:
    """Let oneDNN compute this process's large float32 products (`aten::mm`, so backward passes too).

    Returns:
        False where it would not help: on other vendors' CPUs, without AVX-512, and in a torch without oneDNN.
    """
    if not helps():
        return False
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that `mm` is overridden
        library.impl("mm", matmul, "CPU")
    _overrides.append(library)
    return True


_overrides: list[torch.library.Library] = []  # an override ends with its library


def helps() -> bool:
    """Whether oneDNN's kernels are faster here than MKL's."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and CPU_DESCRIPTION.exists()
        and VENDOR in CPU_DESCRIPTION.read_text()
    )


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b of CPU tensors of any strides. a is [M, K], b is [K, N]."""
    if a.dtype is torch.float32 and b.dtype is torch.float32 and len(a) * b.numel() >= LEAST:
        if a.shape[1] != len(b):
            raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)})")
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.mm(a, b, out=a.new_empty(len(a), b.shape[1]))

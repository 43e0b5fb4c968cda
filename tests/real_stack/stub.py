"""Shared libraries that a package needs to be imported, without what they do: every function returns the same number.

Nothing can compute with them. Imports, signatures, registrations and argument checks are those of the real package.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path

# Of NVIDIA's driver, those that the libraries of SGLang's CUDA stack bind when they are loaded.
CUDA_DRIVER = (
    "cuCtxFromGreenCtx cuCtxGetDevice cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuDevResourceGenerateDesc "
    "cuDevSmResourceSplitByCount cuDeviceGet cuDeviceGetAttribute cuDeviceGetDevResource cuDriverGetVersion "
    "cuGetErrorString cuGetProcAddress_v2 cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxGetDevResource cuInit "
    "cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease "
    "cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuStreamCreate"
)
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def stub_cuda_driver(folder: Path) -> Path:
    """Write a libcuda.so.1 that reports no device; return the folder, for LD_LIBRARY_PATH."""
    return write_libraries(folder, {"libcuda.so.1": CUDA_DRIVER.split()}, returns=NO_DEVICE)


def write_libraries(folder: Path, libraries: dict[str, Iterable[str]], *, returns: int) -> Path:
    """Compile libraries with these functions; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, functions in libraries.items():
        labels = "".join(f".globl {each}\n.type {each},@function\n{each}:\n" for each in functions)
        source = f'.text\n{labels} mov ${returns},%eax\n ret\n.section .note.GNU-stack,"",@progbits\n'
        command = ["gcc", "-shared", "-x", "assembler", "-", "-o", str(folder / name), f"-Wl,-soname,{name}"]
        subprocess.run(command, input=source, text=True, check=True, capture_output=True)
    return folder


def undefined(library: Path) -> set[str]:
    """Names that a library expects from others."""
    return _symbols(library, "--undefined-only")


def defined(library: Path) -> set[str]:
    """Names that a library has for others."""
    return _symbols(library, "--defined-only")


def _symbols(library: Path, which: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.strip()}

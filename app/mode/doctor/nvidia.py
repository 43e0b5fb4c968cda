"""Checks of NVIDIA GPUs: the driver for torch's CUDA, the compiler, and the library of the memory saver."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from app.config import RunConfig
from app.device import Device
from app.device.process_environment import library_folders
from app.mode.doctor.software import uses_memory_saver
from app.mode.finding import CheckStatus, Finding, outcome

QUERY_TIMEOUT_S = 30
DRIVER_VERSION = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
DRIVERS = {12: 525, 13: 580}  # CUDA's major version → the oldest driver's (NVIDIA's release notes)


def checks(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check the driver and, unless the servers are running already, the toolkit."""
    yield from nvidia_driver()
    if not config.rollout.urls:
        yield from nvidia_toolkit(memory_saver=uses_memory_saver(config, device))


def nvidia_driver() -> Iterator[Finding]:
    """Compare the driver with the one that torch's CUDA needs. Says nothing where one of them is unknown."""
    cuda = torch_cuda()
    driver = driver_version()
    if driver is None or cuda is None or int(cuda.partition(".")[0]) not in DRIVERS:
        return

    needed = DRIVERS[int(cuda.partition(".")[0])]
    message = f"{driver}; torch is built for CUDA {cuda}, which needs {needed} or later"
    hint = f"update the driver to {needed} or later; data-center GPUs also run with NVIDIA's cuda-compat package"
    # Where neither is done, torch finds no device, and the check of the devices fails.
    yield outcome("driver", int(driver.partition(".")[0]) >= needed, message, hint, otherwise=CheckStatus.warn)


def nvidia_toolkit(*, memory_saver: bool) -> Iterator[Finding]:
    """Look for the compiler, and for the library that the memory saver is linked to."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    inside = (shutil.which("nvcc", path=f"{home}/bin") for home in homes if home)
    compiler = shutil.which("nvcc") or next(filter(None, inside), None)
    hint = "install the CUDA toolkit, or set CUDA_HOME: SGLang and TileLang compile kernels at their first use"
    yield outcome("nvcc", compiler is not None, compiler or "not found", hint, otherwise=CheckStatus.warn)

    if memory_saver:
        library = find_library("cudart") or next(iter(library_folders()), None)
        hint = "install nvidia-cuda-runtime, or the CUDA toolkit: the memory saver needs it; else offload.engine=false"
        yield outcome("libcudart", library is not None, library or "not found", hint)


def driver_version() -> str | None:
    """Return the driver's version, such as 580.65.06; None if nvidia-smi does not say."""
    try:
        done = subprocess.run(DRIVER_VERSION, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):  # the check of nvidia-smi itself fails
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines and re.match(r"\d+\.", lines[0].strip()) else None


def torch_cuda() -> str | None:
    """Return the CUDA version that the installed torch is built for; None for other builds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b.*= *['\"]([\d.]+)['\"]", version.read_text(encoding="utf-8"), re.M)
    return None if found is None else found[1]

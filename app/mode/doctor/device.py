"""Checks of the device: driver, toolkit, environment variables, and the memory plan. torch is not imported."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from app.config import RunConfig
from app.config.device import DeviceKind
from app.device import Device
from app.device.process_environment import EXPANDABLE, library_folders
from app.mode.doctor import ascend
from app.mode.doctor.software import uses_memory_saver
from app.mode.plan.memory import plan_memory
from app.model.architecture import architecture_of, unknown_shapes
from app.rollout.engine.server_args import engine_flags
from app.start.inputs import CheckStatus, Finding, outcome
from app.utils.units import GIB

TOOLKIT_TIMEOUT_S = 30
DRIVER_VERSION = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
DRIVERS = {12: 525, 13: 580}  # CUDA's major version → the oldest driver's (NVIDIA's release notes)


def hardware(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check driver and toolkit, and whether the memory plan fits."""
    if device.toolkit is not None:
        yield _toolkit(device.toolkit)
    for checks in {DeviceKind.cuda: [nvidia], DeviceKind.npu: [ascend.checks]}.get(device.kind, []):
        yield from checks(config, device)
    yield _memory(config, device)


def variables(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check the current variables of the collective library and the allocator."""
    ours = {**device.trainer_env, **device.engine_env}
    conflicts = {name: value for name, value in ours.items() if os.environ.get(name, value) != value}
    for name, value in conflicts.items():
        message = f"{name}={os.environ[name]} is overridden by {value}"
        yield Finding("variables", message, CheckStatus.warn, "unset it, or change app/device if your value is right")
    if ours and not conflicts:
        yield Finding("variables", f"no conflict with the {len(ours)} variables that the run sets")

    for name in device.allocator_variables:
        if uses_memory_saver(config, device) and EXPANDABLE in os.environ.get(name, ""):
            message = f"{name} sets {EXPANDABLE}; trainer and engines start without it"
            hint = "nothing to do: neither the memory saver nor weight_sync.transport=ipc supports it"
            yield Finding("allocator", message, CheckStatus.warn, hint)

    if config.cluster.address is not None:
        for name, value in device.machine_env.items():
            hint = f"start Ray on every node with {name}={value} (launch/ray_cluster.sh does)"
            yield outcome("cluster", os.environ.get(name) == value, name, hint, otherwise=CheckStatus.warn)


def _toolkit(command: tuple[str, ...]) -> Finding:
    name = command[0]
    hint = f"install the driver, or run where {name} works"
    if shutil.which(name) is None:
        return Finding(name, "not found", CheckStatus.fail, hint)
    try:
        result = subprocess.run(command, capture_output=True, timeout=TOOLKIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        late = f"no answer within {TOOLKIT_TIMEOUT_S} s"
        return Finding(name, late, CheckStatus.fail, "the driver hangs; see its log")
    return outcome(name, result.returncode == 0, f"exit code {result.returncode}", hint)


def _memory(config: RunConfig, device: Device) -> Finding:
    """Check the peak phase of the memory plan. The plan is an estimate, so this warns and never fails."""
    model = architecture_of(config.model)
    if model is None:
        return Finding("memory", unknown_shapes(config.model), CheckStatus.warn, "see mode=plan")

    plan = plan_memory(config, device, model, engine_flags(config, device))
    peak = plan.peak_phase
    total = plan.capacity.bytes
    message = f"{peak.device}, {peak.name}: {peak.bytes / GIB:.1f} of {total / GIB:.1f} GiB ({plan.capacity.source})"
    hint = "mode=plan shows the breakdown; use more devices or a smaller trainer.tokens_per_microbatch"
    return outcome("memory", peak.bytes <= total, message, hint, otherwise=CheckStatus.warn)


def nvidia(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check the driver of NVIDIA's cards and, where engines are to start, the toolkit."""
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
        done = subprocess.run(DRIVER_VERSION, capture_output=True, timeout=TOOLKIT_TIMEOUT_S, encoding="utf-8")
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

"""Checks of the device: driver, toolkit, environment variables, and the memory plan. torch is not imported."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from app.config import RunConfig
from app.config.device import DeviceKind
from app.device import Device
from app.device.process_environment import EXPANDABLE, library_folders
from app.mode.doctor.software import installed, uses_memory_saver
from app.mode.plan.memory import plan_memory
from app.model.architecture import architecture_of, unknown_shapes
from app.start.inputs import CheckStatus, Finding, outcome
from app.utils.units import GIB

TOOLKIT_TIMEOUT_S = 30
DRIVER_VERSION = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
NVIDIA_DRIVERS = {12: 525, 13: 580}  # CUDA's major version → the oldest driver's (NVIDIA's release notes)
DRIVER, INSTALLED, NPU_SMI_LIBRARY = "/usr/local/Ascend/driver", "/etc/ascend_install.info", "/usr/local/dcmi"
DEVICE_FILES = Path("/dev")
CANN = "ASCEND_HOME_PATH"  # set by CANN's set_env.sh
# The oldest that share device memory between processes, as verl asks for them (verl/utils/device.py).
SHARING = {"driver version": "25.3.rc1", "CANN version": "8.3.rc1"}
TRITON = "from triton._C.libtriton import ascend"
TRITON_TIMEOUT_S = 300
# SGLang 0.5.23 hands its NPU graph by position to the memory saver's keyword-only `cuda_graph`; the hook mode `preload`
# serves that release of graph memory.
ENDS_CAPTURE = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": ("1", "true"), "TMS_HOOK_MODE": ("preload",)}


def hardware(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check driver and toolkit, and whether the memory plan fits."""
    if device.toolkit is not None:
        yield _toolkit(device.toolkit)
    if device.kind is DeviceKind.cuda:
        yield from nvidia(config, device)
    if device.kind is DeviceKind.npu:
        yield from ascend(config, device)
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

    plan = plan_memory(config, device, model)
    peak = plan.peak_phase
    total = plan.capacity.bytes
    message = f"{peak.device}, {peak.name}: {peak.bytes / GIB:.1f} of {total / GIB:.1f} GiB ({plan.capacity.source})"
    hint = "mode=plan shows the breakdown; use more devices or a smaller trainer.tokens_per_microbatch"
    return outcome("memory", peak.bytes <= total, message, hint, otherwise=CheckStatus.warn)


def nvidia(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Compare the driver of NVIDIA's cards with torch's CUDA and, where engines are to start, look for the toolkit."""
    cuda, driver = torch_cuda(), driver_version()
    needed = NVIDIA_DRIVERS.get(int(cuda.partition(".")[0])) if cuda is not None else None
    if driver is not None and needed is not None:
        message = f"{driver}; torch is built for CUDA {cuda}, which needs {needed} or later"
        hint = f"update the driver to {needed} or later; data-center GPUs also run with NVIDIA's cuda-compat package"
        # Where neither is done, torch finds no device, and the check of the devices fails.
        yield outcome("driver", int(driver.partition(".")[0]) >= needed, message, hint, otherwise=CheckStatus.warn)
    if config.rollout.urls:
        return

    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    inside = (shutil.which("nvcc", path=f"{home}/bin") for home in homes if home)
    compiler = shutil.which("nvcc") or next(filter(None, inside), None)
    hint = "install the CUDA toolkit, or set CUDA_HOME: SGLang and TileLang compile kernels at their first use"
    yield outcome("nvcc", compiler is not None, compiler or "not found", hint, otherwise=CheckStatus.warn)
    if uses_memory_saver(config, device):
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


def ascend(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check driver, CANN, device files, Triton, and variables that an engine does not survive."""
    hint = "install the driver, or mount it into the container (launch/docker.sh shows how)"
    for path in (DRIVER, INSTALLED, NPU_SMI_LIBRARY):
        exists = Path(path).exists()
        status = CheckStatus.warn if path == NPU_SMI_LIBRARY else CheckStatus.fail
        yield outcome("driver", exists, path if exists else f"{path} is missing", hint, otherwise=status)

    folder = os.environ.get(CANN, "")
    message = f"{CANN}={folder}" if folder else f"{CANN} is not set"
    hint = "source the toolkit's set_env.sh before Python"
    yield outcome("toolkit", bool(folder) and Path(folder).is_dir(), message, hint)

    toolkit = Path(folder) / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    older = CheckStatus.fail if config.shared_devices else CheckStatus.warn  # for weight_sync.transport=ipc
    for (subject, oldest), file in zip(SHARING.items(), (Path(DRIVER) / "version.info", toolkit), strict=True):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        found = re.search(r"^version=(\d+\.\d+(?:\.(?:rc)?\d+)?)", text, re.IGNORECASE | re.MULTILINE)
        if found is not None:
            hint = f"install {oldest} or later: older ones do not share device memory between processes"
            yield outcome(subject, Version(found[1]) >= Version(oldest), found[1], hint, otherwise=older)

    count = str(len(list(DEVICE_FILES.glob("davinci[0-9]*"))))
    expected = os.environ.get("NPUS", count)
    hint = "set NPUS to the number for the launch scripts; Atlas A3 has two dies a card"
    message = f"{count} of /dev/davinci*, NPUS={os.environ.get('NPUS', 'unset')}"
    yield outcome("device files", count == expected, message, hint, otherwise=CheckStatus.warn)

    if installed("triton_ascend") is not None:
        # Mainline Triton, which xgrammar requires, replaces its files.
        command = [sys.executable, "-c", TRITON]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=TRITON_TIMEOUT_S)
        hint = "pip uninstall triton, then install triton_ascend again with --force-reinstall --no-deps"
        why = done.stderr.strip().rpartition("\n")[2] if done.returncode else "imports"
        yield outcome("triton", done.returncode == 0, why, hint)

    for name, values in ENDS_CAPTURE.items():
        value = os.environ.get(name, "")
        if uses_memory_saver(config, device) and value.lower() in values:
            message = f"{name}={value}: engines that release graph memory end when they capture their graphs"
            yield Finding("memory saver", message, CheckStatus.fail, "unset it: graphs stay, as the plan assumes")

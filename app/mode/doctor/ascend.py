"""Checks of Ascend NPUs: driver, CANN, device files, Triton, and variables that an engine does not survive."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from app.config import RunConfig
from app.device import Device
from app.mode.doctor.software import installed, uses_memory_saver
from app.start.inputs import CheckStatus, Finding, outcome

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


def checks(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check what is there; a file that is missing is one finding."""
    for path in (DRIVER, INSTALLED, NPU_SMI_LIBRARY):
        exists = Path(path).exists()
        hint = "install the driver, or mount it into the container (launch/docker.sh shows how)"
        status = CheckStatus.warn if path == NPU_SMI_LIBRARY else CheckStatus.fail
        yield outcome("driver", exists, path if exists else f"{path} is missing", hint, otherwise=status)

    folder = os.environ.get(CANN, "")
    message = f"{CANN}={folder}" if folder else f"{CANN} is not set"
    hint = "source the toolkit's set_env.sh before Python"
    yield outcome("toolkit", bool(folder) and Path(folder).is_dir(), message, hint)
    yield from _versions(Path(folder), CheckStatus.fail if config.shared_devices else CheckStatus.warn)

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


def _versions(cann: Path, otherwise: CheckStatus) -> Iterator[Finding]:
    """Compare driver and CANN with the oldest for `weight_sync.transport=ipc`."""
    files = (Path(DRIVER) / "version.info", cann / f"{platform.machine()}-linux" / "ascend_toolkit_install.info")
    for (subject, oldest), file in zip(SHARING.items(), files, strict=True):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        found = re.search(r"^version=(\d+\.\d+(?:\.(?:rc)?\d+)?)", text, re.IGNORECASE | re.MULTILINE)
        if found is not None:
            hint = f"install {oldest} or later: older ones do not share device memory between processes"
            yield outcome(subject, Version(found[1]) >= Version(oldest), found[1], hint, otherwise=otherwise)

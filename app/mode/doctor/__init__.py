"""`mode=doctor`: check whether this machine can run the configuration. Exit code 1 when a check fails.

Invariants:
- Nothing is downloaded or written, and nothing is started but processes that try your own reward and the environment.
- Every finding that is not ok has a hint.
"""

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from app.config import RunConfig
from app.errors import FAILED_EXIT
from app.mode import ModeResult
from app.mode.doctor import device, software
from app.start.inputs import CheckStage, CheckStatus, Finding, RunInputs, outcome
from app.start.preflight import findings
from app.utils.child_environment import LAUNCHER, encoding, home_is_writable
from app.utils.process import SHARED_MEMORY
from app.utils.units import GIB

SHARED_GIB_FAIL = 0.25  # Ray's object store and tensors between processes live there
SHARED_GIB_WARN = 2.0
OPEN_FILES_WARN = 4096
FULL_DISK = 0.95  # Ray stops spilling objects there
PROXIES = ("http_proxy", "https_proxy", "all_proxy")

OUTPUTS = Path("outputs")


def run(config: RunConfig, folder: Path | None) -> ModeResult:
    """Print the findings. The metric is the exit code."""
    found = examine(config, folder or OUTPUTS)
    sys.stdout.write(table(found) + "\n")
    code = FAILED_EXIT if any(each.status is CheckStatus.fail for each in found) else 0
    return ModeResult(float(code), code)


def examine(config: RunConfig, folder: Path = OUTPUTS) -> list[Finding]:
    """Run every check, in the order in which problems should be fixed."""
    inputs = RunInputs(config, CheckStage.doctor, folder=folder)
    return [
        *software.software(config, inputs.device),
        *device.hardware(config, inputs.device),
        *device.variables(config, inputs.device),
        *machine(),
        *findings(inputs),
    ]


def table(found: Sequence[Finding]) -> str:
    """Format one line per finding, each hint below its line, and the counts at the end."""
    width = max(len(one.subject) for one in found)
    lines: list[str] = []
    for one in found:
        lines.append(f"{one.status.name:<4}  {one.subject:<{width}}  {one.message}")
        if one.hint:
            lines.append(f"{'':<4}  {'':<{width}}  → {one.hint}")

    counts = [f"{sum(one.status is status for one in found)} {status.name}" for status in reversed(CheckStatus)]
    return "\n".join([*lines, ", ".join(counts)])


def machine() -> Iterator[Finding]:
    """Check shared memory, open files, the disk of Ray's session folder, and what a run's processes would inherit."""
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free / GIB
        hint = "give the container more: --ipc=host or --shm-size=16g; in Kubernetes an emptyDir of medium Memory"
        status = CheckStatus.fail if free < SHARED_GIB_FAIL else CheckStatus.warn
        yield outcome("shared memory", free >= SHARED_GIB_WARN, f"{free:.1f} GiB free", hint, otherwise=status)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hint = f"ulimit -n {hard} (the hard limit), or raise it in the container or unit settings"
    yield outcome("open files", soft >= OPEN_FILES_WARN, f"limit {soft:,}", hint, otherwise=CheckStatus.warn)

    folder = tempfile.gettempdir()
    usage = shutil.disk_usage(folder)
    used = 1 - usage.free / usage.total
    hint = f"free some space: Ray refuses to spill objects at {FULL_DISK:.0%}"
    message = f"{folder} is {used:.0%} full"
    yield outcome("temporary files", used < FULL_DISK, message, hint, otherwise=CheckStatus.warn)

    hint = "export LC_ALL=C.UTF-8: names of files and settings beyond ASCII may not be found"
    names = sys.getfilesystemencoding()  # Python has UTF-8 in the C locale, too
    yield outcome("locale", names == "utf-8", f"{encoding(os.environ)}, {names}", hint, otherwise=CheckStatus.warn)

    hint = "set HOME to a folder that can be written: else each run has one of its own and compiles its kernels anew"
    yield outcome("home", home_is_writable(), os.path.expanduser("~"), hint, otherwise=CheckStatus.warn)

    if " " in sys.executable:
        hint = "if kernels do not compile, install on a path without spaces: FlashInfer's builds do not quote it"
        yield outcome("interpreter", find_spec("flashinfer") is None, sys.executable, hint, otherwise=CheckStatus.warn)

    if placed := sorted(filter(LAUNCHER.fullmatch, os.environ)):
        hint = "start a run once, without torchrun or mpirun: it starts its own ranks"
        alone = all(os.environ.get(name, "1") == "1" for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
        yield outcome("launcher", alone, f"not inherited: {', '.join(placed)}", hint, otherwise=CheckStatus.warn)

    if proxies := sorted(name for name in os.environ if name.lower() in PROXIES):
        yield Finding("proxies", f"{', '.join(proxies)}; a run's own servers are outside of them")

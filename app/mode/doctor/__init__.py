"""`mode=doctor`: check whether this machine can run the configuration. Exit code 1 when a check fails.

Invariants:
- Nothing is downloaded or written, and nothing is started but processes that try your own reward and the environment.
- Every finding that is not ok has a hint.
"""

import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from app.config import RunConfig
from app.data import records, rows
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
REACH_TIMEOUT_S = 10.0
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
        *reachable(config),
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


def reachable(config: RunConfig) -> Iterator[Finding]:
    """Check access to what a run downloads, to its cluster, and to engines that are running."""
    if not config.model.local.is_dir():
        yield _hub("model", str(config.model.path), "model.path")
    teacher = config.teacher.model(config.model)
    if teacher is not None and not teacher.local.is_dir():
        yield _hub("model", str(teacher.path), "teacher.path")
    for key, path in rows.sets_of(config.data).paths.items():
        for part in [path] if isinstance(path, str) else path:
            if records.is_remote(part) and not Path(part).expanduser().is_dir():
                yield _hub("dataset", part, key)

    if config.cluster.address not in (None, "auto", "local"):
        yield _cluster(str(config.cluster.address))
    for url in config.rollout.urls:
        yield _answers("engine", f"{url.rstrip('/')}/health", url, "start the server, or correct rollout.urls")


def _hub(kind: str, name: str, key: str) -> Finding:
    """Check that the hub, or its local cache, has a repository."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound
    from huggingface_hub.utils import build_hf_headers

    try:
        if any(repo.repo_id == name and repo.repo_type == kind for repo in scan_cache_dir().repos):
            return Finding("hub", f"{name}, in its cache")
    except CacheNotFound:
        pass  # nothing was ever downloaded

    request = Request(f"{constants.ENDPOINT}/api/{kind}s/{quote(name)}", headers=build_hf_headers())
    hint = f"download it on a machine with network access, and set {key}=... to its folder"
    return _answers("hub", request, name, hint)


def _answers(subject: str, request: str | Request, name: str, hint: str) -> Finding:
    try:
        with urlopen(request, timeout=REACH_TIMEOUT_S) as reply:
            return outcome(subject, reply.status == 200, f"{name} answers with {reply.status}", hint)
    except OSError as error:  # every failure of urllib
        return Finding(subject, f"{name} cannot be reached: {error}", CheckStatus.fail, hint)


def _cluster(address: str) -> Finding:
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=REACH_TIMEOUT_S):
            return Finding("cluster", f"{address} answers")
    except OSError as error:
        hint = "start Ray there (launch/ray_cluster.sh), open the port, or leave cluster.address=null"
        return Finding("cluster", f"{address}: {error}", CheckStatus.fail, hint)

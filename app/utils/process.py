"""Helpers for our own processes: log redirection, commands, memory use, the names of shared memory."""

import ctypes
import logging
import os
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from app.types import MemoryUse

CGROUP = Path("/sys/fs/cgroup")
PARENT_VARIABLE = "POSTTRAIN_ENGINE_PARENT"  # of the environment of SGLang servers, where it is the first
MARK = "POSTTRAIN_RUN"  # environment variable that all processes of a run inherit
SHARED_MEMORY = Path("/dev/shm")


def run_prefix() -> str:
    """Return what the names of a run's files in shared memory begin with. The process reaper removes these files.

    Processes without a mark, such as actors of a cluster that the run joined, have prefixes of their own.
    """
    return f"posttrain-{os.environ.get(MARK) or os.getpid()}-"


def log_to(path: Path) -> None:
    """Append stdout, stderr and log records of this process to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()

    # Redirect the descriptors themselves, so that the output of C++ libraries and of child processes follows.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def module_command(name: str) -> list[str]:
    """Return the command that runs a module of this package, whatever the working directory contains.

    With a plain `-m`, a folder `app` in the working directory would be imported instead. The process needs
    `package_path` as its PYTHONPATH.
    """
    return [sys.executable, "-P", "-m", name]


def package_path(path: str | None) -> str:
    """Return this PYTHONPATH with the folder that contains this package in front.

    Installed packages are found without it; their folder in front would hide modules of the standard library.
    """
    root = str(Path(__file__).resolve().parents[2])
    first = [] if root == sysconfig.get_path("purelib") else [root]
    return os.pathsep.join([*first, *filter(None, [path])])


def process_group_members(leader: int) -> list[int]:
    """Return the process ids of a process group, given its leader's."""
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == leader:
                members.append(pid)
    return members


def memory_use(pids: Sequence[int]) -> MemoryUse:
    """Return the memory of these processes of this machine together. Ended processes count as 0."""
    resident = 0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            resident += psutil.Process(pid).memory_info().rss

    machine_used = psutil.virtual_memory().percent / 100
    return MemoryUse(resident, max(machine_used, _container_used(CGROUP)))


def trim_heap() -> None:
    """Return the heap's free pages to the system: glibc keeps them, between tensors of other sizes, and grows on."""
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def _container_used(cgroup: Path) -> float:
    """Return the used fraction of the container's memory limit (cgroup v2); 0.0 without a limit.

    Page cache does not count: the kernel reclaims it under pressure.
    """
    try:
        limit = (cgroup / "memory.max").read_text(encoding="utf-8").strip()
        if limit == "max":
            return 0.0

        counters = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="utf-8").splitlines())
        page_cache = int(counters["inactive_file"]) + int(counters["active_file"])
        return (int((cgroup / "memory.current").read_text(encoding="utf-8")) - page_cache) / int(limit)
    except (OSError, KeyError):
        return 0.0

"""What our processes do for themselves: write to a log of their own, end with their parent, tell their memory."""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from app.types import MemoryUse

PR_SET_PDEATHSIG = 1
CGROUP = Path("/sys/fs/cgroup")


def log_to(path: Path, level: int = logging.INFO) -> None:
    """Send this process's output and log records to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    logging.basicConfig(
        level=level, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that ends."""
    ctypes.CDLL("libc.so.6").prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def group_members(leader: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def memory_use(pids: Sequence[int]) -> MemoryUse:
    """What these processes of this machine hold together; one that is gone holds nothing."""
    resident = 0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            resident += psutil.Process(pid).memory_info().rss
    return MemoryUse(resident, max(psutil.virtual_memory().percent / 100, _share_of_limit(CGROUP)))


def _share_of_limit(cgroup: Path) -> float:
    """How much of a container's memory limit is used, without what the kernel would give back (cgroup v2); 0: none."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return 0.0
        counters = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        files = int(counters["inactive_file"]) + int(counters["active_file"])
        return (int((cgroup / "memory.current").read_text()) - files) / int(limit)
    except (OSError, KeyError):
        return 0.0

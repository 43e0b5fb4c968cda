"""The lock of a run's folder. A process holds it while it writes into the folder.

The kernel releases the lock when its process ends, so a killed run leaves nothing to clean up. Processes on one machine
always exclude each other. On shared storage, machines exclude each other where the file system supports `flock` across
machines: NFS does unless mounted with `nolock` or `local_lock`, Lustre if mounted with `flock`.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import RunError
from app.utils.files import describe

LOCK = "driver.lock"


class FolderInUse(RunError):
    """Another process holds the lock of a run's folder."""


def is_abandoned(folder: Path) -> bool:
    """Whether a process of this machine had the lock and has ended. Of another machine's process nothing is known."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return lock.read().endswith(f" on {socket.gethostname()}\n")
    except OSError:
        return False


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, which is created. Raises `FolderInUse`, before anything in it changes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # "a" leaves the content alone: until the lock is ours, it names the process that holds it.
        lock = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder} cannot be locked: {describe(error)}") from error

    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise FolderInUse(f"{folder} is in use: {holder} is writing to it") from None
        except OSError as error:
            why = f"{describe(error)}; is it on a file system with locks?"
            raise RunError(f"{folder} cannot be locked: {why}") from error

        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield

"""Child processes that end with their parent, as a group. Imports only the standard library."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
STDERR = 2


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends (Linux only).

    Args:
        parent: The parent's process id, read before this process was started.

    Raises:
        SystemExit: The parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def start_group(
    command: Sequence[str], environment: Mapping[str, str], log: Path | None, pipe: int
) -> subprocess.Popen[bytes]:
    """Start a process as the leader of a process group, so that `kill_group` also reaches its children.

    Args:
        command: Program and arguments.
        environment: Its environment variables.
        log: File that its output is appended to (None: stderr).
        pipe: Descriptor that it inherits.

    Raises:
        OSError: There is no such program, or it cannot be run.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    output = STDERR if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[pipe],
            process_group=0,
        )
    finally:
        if output != STDERR:
            os.close(output)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and its children. Skip a reaped group, whose id may have been reused."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it exited in the meantime
            os.killpg(process.pid, signal.SIGKILL)


def exit_text(code: int | None) -> str:
    """Return how a process ended, in parentheses, for a sentence; nothing while it runs.

    >>> exit_text(3), exit_text(-9), exit_text(None)
    (' (exit code 3)', ' (signal 9)', '')
    """
    if code is None:
        return ""
    return f" (signal {-code})" if code < 0 else f" (exit code {code})"

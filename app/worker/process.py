"""A child process that ends with its parent, as a group. Imports only the standard library."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
STDERR = 2
EXIT_TIMEOUT_S = 1.0  # between the end of a worker's pipe and its exit
GIB = 1 << 30
KILL_TIMEOUT_S = 10.0  # a killed process ends at once, unless it is stuck in a driver or a network file system
PARENT_ONLY = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "__PYVENV_LAUNCHER__")  # not for another interpreter
SCRIPT = Path(__file__).with_name("__main__.py")


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; exit if `parent` has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def log(text: str) -> None:
    """Append lines to the log of this worker: its stderr, whatever a job does to `sys.stderr`."""
    with contextlib.suppress(OSError):  # a job has closed it
        os.write(STDERR, f"{text.rstrip()}\n".encode(errors="backslashreplace"))


@dataclass(eq=False)
class WorkerProcess:
    """A process group. Only `start` raises; everything else is idempotent.

    Lifecycle: start → kill → reap, or start → end.
    """

    handler: str  # module that it serves with
    python: str | None  # interpreter, with the working directory and its own packages; None: ours, with our `sys.path`
    log: Path | None  # file that its output is appended to; None: stderr
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> socket.socket:
        """Start the process and return our end of the pipe. Raises `OSError` without an interpreter or memory."""
        ours, its = socket.socketpair()
        with its:
            try:
                self._process = self._spawn(its.fileno())
            except BaseException:
                ours.close()
                raise
        return ours

    def has_exited(self) -> bool:
        """Whether the process has ended, without reaping it: until then its id, and its group's, are its own."""
        if self._process is None:
            return False
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> None:
        """Send SIGKILL to the process and its children. A reaped group is skipped: its id may have been reused."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it exited in the meantime
                os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self, timeout_s: float = KILL_TIMEOUT_S) -> int | None:
        """Wait for a killed process: milliseconds, unless much memory is freed. Returns its exit code, if known."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
            return self._process.wait(timeout_s)
        return None

    def end(self) -> str:
        """Kill what is left of a process that has ended or is about to: its children first, while its id is its own.

        Returns how it ended, for a sentence: ` (exit code 3)`, ` (signal 9)`, or nothing if that is not known.
        """
        self.kill()
        code = self.reap(EXIT_TIMEOUT_S)
        if code is None:
            return ""
        return f" (signal {-code})" if code < 0 else f" (exit code {code})"

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        """Start the process as the leader of a process group, so that `kill` also reaches its children."""
        from app.utils.child_environment import for_children  # not in the worker: its interpreter may lack psutil

        environment = {"OMP_NUM_THREADS": "1", **for_children(os.environ), "PYTHONUNBUFFERED": "1"}
        if self.python is None:
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        else:
            environment = {name: value for name, value in environment.items() if name not in PARENT_ONLY}

        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        output = STDERR if self.log is None else os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            return subprocess.Popen(
                [self.python or sys.executable, str(SCRIPT), str(descriptor), str(os.getpid()), self.handler],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[descriptor],
                process_group=0,
            )
        finally:
            if output != STDERR:
                os.close(output)


def limit_memory(gib: float) -> None:
    """Limit the data of this process and of each child, without what is only reserved. Raises `LoadError`."""
    from app.utils.user_code import LoadError

    status = Path("/proc/self/status").read_text(encoding="utf-8")
    allocated = int(status.partition("VmData:")[2].split()[0]) << 10
    if allocated > gib * GIB:
        raise LoadError(
            f"environment.memory_gib={gib:g} is not accepted: give more than {allocated / GIB:.2g}, which the worker "
            "has allocated before the first episode."
        )

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

"""The process of one environment worker: what it runs, its start, its end and its exit code."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import app
from app.environment.wire import Limits, RendererChoice
from app.errors import ConfigError
from app.utils.child_process import kill_group, start_group

EXIT_LIMIT_S = 1.0  # between the end of a worker's pipe and its exit
KILL_LIMIT_S = 10.0  # a killed process ends at once, unless it is stuck in a driver or a network file system
PARENT_ONLY = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "__PYVENV_LAUNCHER__")  # not for another interpreter


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What every worker runs. JSON values only.

    Attributes:
        environment: `kind`, and what its module's `make` takes: `target` and `args` for `own`, `tools`, `id`, `url`.
        memory_gib: Data that a worker, or a child of it, may allocate.
        python: Interpreter. None: ours, where the environment can import what the driver can. Another one has the
            working directory and its own packages.
    """

    environment: Mapping[str, Any]
    renderer: RendererChoice
    limits: Limits
    memory_gib: float = 8.0
    python: str | None = None


class EnvironmentProcess:
    """A process group. Nothing but `start` raises, and everything else is idempotent.

    Lifecycle: start → kill → reap, or start → end.

    Args:
        python: Interpreter. None: ours, with our `sys.path`.
        log: File for its output (None: stderr).
    """

    def __init__(self, python: str | None, log: Path | None) -> None:
        self._python = python
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the start."""
        return None if self._process is None else self._process.pid

    def start(self) -> socket.socket:
        """Start the process and return our end of its pipe.

        Raises:
            ConfigError: The interpreter cannot be run.
        """
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
        """Send SIGKILL to the process and its children."""
        if self._process is not None:
            kill_group(self._process)

    def reap(self) -> None:
        """Wait for the killed process."""
        self._wait(KILL_LIMIT_S)

    def end(self) -> int | None:
        """Kill what is left of a process that has ended or is about to; return its exit code, None if it is not known.

        Its children are killed before it is reaped, while its id is its own.
        """
        self.kill()
        return self._wait(EXIT_LIMIT_S)

    def _wait(self, limit_s: float) -> int | None:
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
            return self._process.wait(limit_s)
        return None

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        python = self._python or sys.executable
        script = Path(app.__file__).parent / "environment" / "worker" / "__main__.py"
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        if self._python is None:
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        else:
            environment = {name: value for name, value in environment.items() if name not in PARENT_ONLY}

        command = [python, str(script), str(descriptor), str(os.getpid())]
        try:
            return start_group(command, environment, self._log, descriptor)
        except OSError as error:
            raise ConfigError(f"environment.python={python} cannot be run: {error.strerror}.") from error

"""Driver side of one reward worker: start it, call it, and replace it when it times out or dies.

Invariants:
- `call` returns within its limit (seconds per trajectory × trajectories), plus one worker startup if the process had to
  be replaced.
- A worker is used by one thread at a time.
- The thread that starts a worker outlives it: the kernel kills the worker when that thread ends (`die_with_parent`).
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from app.errors import RunError
from app.reward.component import LoadError, RewardComponent
from app.reward.outcome import Failure, FailureKind, Outcome
from app.types import Trajectory
from app.utils.process import module_command

START_LIMIT_S = 60.0  # includes the imports of custom rewards
SEND_LIMIT_S = 30.0  # until the worker, which is between two calls, reads the trajectories; whole seconds
EXIT_LIMIT_S = 1.0  # between the end of a worker's pipe and its exit
KILL_LIMIT_S = 10.0  # a killed process ends at once, unless it is stuck in a driver or a network file system
STDERR = 2


class WorkerProcess:
    """One worker process that has loaded `components`. Its output goes to `log` (None: stderr).

    Lifecycle: start → call* → close, then kill. `call` starts a missing process and kills a hanging one.

    Attributes:
        retried: Trajectories that were scored again, alone, after the call for several of them failed.
    """

    def __init__(self, components: Sequence[RewardComponent], log: Path | None) -> None:
        self._components = list(components)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._ready = False  # the process has loaded its components
        self._closed = False
        self.retried = 0

    @property
    def pid(self) -> int | None:
        """Process id of the current worker process, if any."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and load its components, unless that is done.

        Raises:
            LoadError: A component cannot be loaded.
            RunError: The process died or timed out while loading.
        """
        if self._closed:
            return
        self._launch()
        if self._pipe is not None and not self._ready:
            self._await_ready(self._pipe)

    def call(self, component: str, trajectories: Sequence[Trajectory], limit_s: float) -> Outcome:
        """Score these trajectories with one component, within `limit_s` seconds each: the call has their sum."""
        self.start()
        if self._pipe is None:
            return Failure(FailureKind.died, "the scorer was closed")

        try:
            self._pipe.send((component, trajectories))
            if self._pipe.poll(limit_s * len(trajectories)):
                return self._pipe.recv()
            counted = f" for each of {len(trajectories)} trajectories" if len(trajectories) > 1 else ""
            failure = Failure(FailureKind.timeout, f"no result within reward.timeout_s={limit_s:g}{counted}")
        except BlockingIOError:
            failure = Failure(FailureKind.timeout, f"the worker read no trajectories for {SEND_LIMIT_S:g} s")
        except (EOFError, ConnectionError):
            failure = Failure(FailureKind.died, f"the worker process died{self._exit_status}{self._see_log}")

        self.kill()
        if not self._closed:
            self._launch()  # imports run in the background; the next `call` waits for them
        return failure

    def kill(self) -> None:
        """Kill the process and its children; the next `call` starts another."""
        if self._process is not None:
            _kill_group(self._process)
            with contextlib.suppress(subprocess.TimeoutExpired):  # another process takes its place
                self._process.wait(KILL_LIMIT_S)
        if self._pipe is not None:
            self._pipe.close()

        self._process = None
        self._pipe = None
        self._ready = False

    def close(self) -> None:
        """Kill the process for good, from any thread; a `call` in flight returns a failure."""
        self._closed = True
        process = self._process  # the calling thread may be replacing it; `kill` runs after that thread has ended
        if process is not None:
            _kill_group(process)

    def _launch(self) -> None:
        """Start the process, unless one is running, and send it its components, without waiting."""
        if self._pipe is None:
            pipe, worker_end = multiprocessing.Pipe()
            _limit_sends(pipe, SEND_LIMIT_S)
            with worker_end:
                self._process = self._spawn(worker_end)
            self._pipe = pipe
            self._pipe.send(self._components)
            if self._closed:
                self.kill()  # `close`, in another thread, may have looked for a process before this one

    def _await_ready(self, pipe: Connection) -> None:
        names = ", ".join(component.name for component in self._components)
        try:
            if not pipe.poll(START_LIMIT_S):
                raise RunError(f"A reward worker did not load {names} within {START_LIMIT_S:g} s{self._see_log}.")
            load_error = pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise RunError(f"A reward worker died while loading {names}{self._see_log}.") from error

        if load_error is not None:
            raise LoadError(load_error)
        self._ready = True

    def _spawn(self, worker_end: Connection) -> subprocess.Popen[bytes]:
        command = [*module_command(f"{__package__}.worker"), str(worker_end.fileno()), str(os.getpid())]
        # the worker can import whatever the driver can, custom modules included
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search_path}

        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        log = STDERR if self._log is None else os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[worker_end.fileno()],
                process_group=0,  # a kill also reaches the children of a reward
            )
        finally:
            if log != STDERR:
                os.close(log)

    @property
    def _exit_status(self) -> str:
        """` (exit code 3)` or ` (signal 9)` of the process, which has closed its pipe."""
        assert self._process is not None
        try:
            code = self._process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" (signal {-code})" if code < 0 else f" (exit code {code})"

    @property
    def _see_log(self) -> str:
        return "" if self._log is None else f"; log: {self._log}"


def _limit_sends(pipe: Connection, seconds: float) -> None:
    """Let a send on this pipe raise `BlockingIOError` when the other end has read nothing for so long."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), 0))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and its children. Skip a reaped group, whose id may have been reused."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it exited in the meantime
            os.killpg(process.pid, signal.SIGKILL)

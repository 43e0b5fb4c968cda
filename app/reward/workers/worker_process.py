"""Driver side of one reward worker: start it, call it, and replace it when it times out or dies.

Invariants:
- `call` returns within its deadline, plus one worker startup if the process had to be replaced.
- A worker is used by one thread at a time.
- The thread that starts a worker outlives it: the kernel kills the worker when that thread ends (`die_with_parent`).
"""

import contextlib
import math
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from app.errors import RunError
from app.reward.component import RewardComponent
from app.reward.outcome import Failure, FailureKind, Outcome
from app.types import Trajectory
from app.utils.child_process import exit_text, kill_group, start_group
from app.utils.dotted_path import LoadError
from app.utils.process import module_command

START_LIMIT_S = 60.0  # includes the imports of custom rewards
SEND_LIMIT_S = 30.0  # until the worker, which is between two calls, reads the trajectories; whole seconds
EXIT_LIMIT_S = 1.0  # between the end of a worker's pipe and its exit
KILL_LIMIT_S = 10.0  # a killed process ends at once, unless it is stuck in a driver or a network file system
NO_LOG = Path(os.devnull)


class WorkerProcess:
    """One worker process that has loaded a component. Its output goes to `log` (None: stderr).

    Lifecycle: start → call* → close, then kill. `call` starts a missing process and kills a hanging one.
    """

    def __init__(self, component: RewardComponent, log: Path | None) -> None:
        self._component = component
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._ready = False  # the process has loaded its component
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the current worker process, if any."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and load its component, unless that is done. One that dies while loading is replaced once.

        Raises:
            LoadError: The component cannot be loaded.
            RunError: The process and its successor died while loading, or it timed out.
        """
        for successor in (False, True):
            if not self._closed:
                self._launch()
            if self._pipe is None or self._ready:
                return

            try:
                self._await_ready(self._pipe)
            except (EOFError, ConnectionError) as error:
                self.kill()
                if successor:
                    name = self._component.name
                    raise RunError(f"A reward worker died while loading {name}{self._see_log}.") from error

    def call(
        self,
        trajectories: Sequence[Trajectory],
        deadline_s: float,
        *,
        slow_after_s: float = math.inf,
        on_slow: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Score these trajectories within `deadline_s` seconds; call `on_slow` when it takes `slow_after_s` of them."""
        self.start()
        if self._pipe is None:
            return Failure(FailureKind.died, "the scorer was closed")

        try:
            self._pipe.send(trajectories)
            if self._answers(self._pipe, deadline_s, slow_after_s, on_slow):
                return self._pipe.recv()
            late = f"no result for {len(trajectories)} completion(s) within {deadline_s:g} s, see reward.timeout_s"
            failure = Failure(FailureKind.timeout, late)
        except BlockingIOError:
            failure = Failure(FailureKind.timeout, f"the worker read no trajectories for {SEND_LIMIT_S:g} s")
        except (EOFError, ConnectionError):
            failure = Failure(FailureKind.died, f"the worker process died{self._exit_status}{self._see_log}")

        self._write_to_log(failure)
        self.kill()
        if not self._closed:
            self._launch()  # imports run in the background; the next `call` waits for them
        return failure

    @staticmethod
    def _answers(pipe: Connection, deadline_s: float, slow_after_s: float, on_slow: Callable[[], None]) -> bool:
        """Whether the worker answers before the deadline."""
        if slow_after_s >= deadline_s:
            return pipe.poll(deadline_s)
        if pipe.poll(slow_after_s):
            return True
        on_slow()
        return pipe.poll(deadline_s - slow_after_s)

    def _write_to_log(self, failure: Failure) -> None:
        """Add a failure that the worker itself could not report to its log."""
        if self._log is not None and not self._closed:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(f"{self._component.name} failed: {failure}\n")

    def kill(self) -> None:
        """Kill the process and its children; the next `call` starts another."""
        if self._process is not None:
            kill_group(self._process)
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
            kill_group(process)

    def _launch(self) -> None:
        """Start the process, unless one is running, and send it its component, without waiting."""
        if self._pipe is None:
            pipe, worker_end = multiprocessing.Pipe()
            _limit_sends(pipe, SEND_LIMIT_S)
            with worker_end:
                self._process = self._spawn(worker_end)
            self._pipe = pipe
            self._pipe.send(self._component)
            if self._closed:
                self.kill()  # `close`, in another thread, may have looked for a process before this one

    def _await_ready(self, pipe: Connection) -> None:
        if not pipe.poll(START_LIMIT_S):
            name = self._component.name
            raise RunError(f"A reward worker did not load {name} within {START_LIMIT_S:g} s{self._see_log}.")

        load_error = pipe.recv()
        if load_error is not None:
            raise LoadError(load_error)
        self._ready = True

    def _spawn(self, worker_end: Connection) -> subprocess.Popen[bytes]:
        command = [*module_command(f"{__package__}.worker"), str(worker_end.fileno()), str(os.getpid())]
        # the worker can import whatever the driver can, custom modules included
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search_path}
        return start_group(command, environment, self._log, worker_end.fileno())

    @property
    def _exit_status(self) -> str:
        """` (exit code 3)` or ` (signal 9)` of the process, which has closed its pipe."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_LIMIT_S)
        return exit_text(self._process.returncode)

    @property
    def _see_log(self) -> str:
        return "" if self._log in (None, NO_LOG) else f"; log: {self._log}"


def _limit_sends(pipe: Connection, seconds: float) -> None:
    """Let a send on this pipe raise `BlockingIOError` when the other end has read nothing for so long."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), 0))

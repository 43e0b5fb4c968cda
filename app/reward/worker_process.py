"""The parent's side of one reward worker: start it, ask it, kill and replace it when it does not answer in time.

Always holds: a call of `ask` takes no longer than its limit, plus a start if the process had to be replaced. One thread
at a time; the thread that starts a worker must outlive it, for the kernel ties the two (see `worker.die_with`).
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from app.errors import RunError
from app.reward.component import LoadError, RewardComponent
from app.reward.outcome import Failure, FailureKind, Outcome
from app.types import Trajectory

START_LIMIT_S = 60.0  # imports included, a user's own too
STDERR = 2


class WorkerProcess:
    """One process that has loaded `parts`; `log` gets what it prints (null: our stderr)."""

    def __init__(self, parts: Sequence[RewardComponent], log: Path | None) -> None:
        self._parts, self._log = list(parts), log
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._ready = False  # the process has loaded its parts
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start and load, unless that was done. `LoadError` if a part cannot be loaded, else `RunError`."""
        if self._closed:
            return
        self._launch()
        if not self._ready:
            self._await_ready()

    def ask(self, part: str, trajectories: Sequence[Trajectory], limit_s: float) -> Outcome:
        """What a part gives for these trajectories, within `limit_s` seconds for the whole call."""
        self.start()
        if self._pipe is None:
            return Failure(FailureKind.died, "the scorer was closed")
        try:
            self._pipe.send((part, trajectories))
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
            failure = Failure(FailureKind.timeout, f"no answer within reward.timeout_s={limit_s:g}")
        except (EOFError, ConnectionError):
            failure = Failure(FailureKind.died, f"its process ended by itself{self._see_log}")
        self.kill()
        if not self._closed:
            self._launch()  # it imports while we go on; the next `ask` waits for it
        return failure

    def kill(self) -> None:
        """End the process and whatever it started; the next `ask` starts another."""
        if self._process is not None:
            _kill_group(self._process)
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process, self._pipe, self._ready = None, None, False

    def close(self) -> None:
        """From any thread: end the process for good; an `ask` that waits for it returns a failure."""
        self._closed = True
        process = self._process  # another thread may be replacing it; `kill` comes after that thread has ended
        if process is not None:
            _kill_group(process)

    def _launch(self) -> None:
        """Start the process, unless there is one, and hand it its parts, without waiting."""
        if self._pipe is None:
            self._pipe, theirs = multiprocessing.Pipe()
            with theirs:
                self._process = self._spawn(theirs)
            self._pipe.send(self._parts)

    def _await_ready(self) -> None:
        assert self._pipe is not None
        try:
            if not self._pipe.poll(START_LIMIT_S):
                raise RunError(f"A reward worker did not load {self._names} within {START_LIMIT_S:g} s{self._see_log}.")
            refusal = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise RunError(f"A reward worker ended while it loaded {self._names}{self._see_log}.") from error
        if refusal is not None:
            raise LoadError(refusal)
        self._ready = True

    def _spawn(self, theirs: Connection) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"{__package__}.worker", str(theirs.fileno()), str(os.getpid())]
        # what we can import, it can: a user's own module too
        search = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search}
        log = STDERR if self._log is None else os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a kill reaches what a reward started
            )
        finally:
            if log != STDERR:
                os.close(log)

    @property
    def _names(self) -> str:
        return ", ".join(part.name for part in self._parts)

    @property
    def _see_log(self) -> str:
        return "" if self._log is None else f"; its log is {self._log}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and what it started; not to a group that is gone, whose number may be another's by now."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            os.killpg(process.pid, signal.SIGKILL)

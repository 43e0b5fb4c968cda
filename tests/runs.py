"""Starts the application as its users do, and finds every process that it started."""

import atexit
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil

from app.cpu_engine.forked_server import SOCKET_VARIABLE, ForkedProcess, fork_server
from app.device.cpu import DEVICE

MARK = "POSTTRAIN_TEST_RUN"
KEEP_NOTHING = ("checkpoint.keep=0", "checkpoint.export=false")


@cache
def shared_fork_server() -> partial[ForkedProcess]:
    """The fork server of all engines of a session, also of those of its runs. Returns `fork` of its socket."""
    stack = ExitStack()
    fork = stack.enter_context(fork_server(DEVICE.engine_env, Path(os.devnull)))
    atexit.register(stack.close)
    assert isinstance(fork, partial)
    return fork


class Run:
    """`python -m app` in a process group of its own. All its descendants carry a mark in their environment.

    `prefix` comes before the command line; its engines are forked by the session's server, unless `imports_sglang`.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        module: str = "app",
        prefix: Sequence[str] = (),
        imports_sglang: bool = False,
    ) -> None:
        self.folder, self.mark = folder / "run", secrets.token_hex(8)
        self._seen: set[psutil.Process] = set()
        self.output = folder / "output.txt"
        if not any(each.startswith(("checkpoint.", "mode=", "resume=")) for each in overrides):
            overrides = (*overrides, *KEEP_NOTHING)
        fork = {} if imports_sglang else {SOCKET_VARIABLE: str(shared_fork_server().args[0])}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, *overrides, f"hydra.run.dir={self.folder}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**os.environ, MARK: self.mark, **fork},
            )

    def wait(self, seconds: float = 280) -> int:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            self.processes()
            assert time.monotonic() < deadline, f"no end within {seconds} s:\n{self.text}"
            time.sleep(0.2)
        return self.process.returncode

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the process group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_for_step(self, step: int, seconds: float = 240) -> None:
        """Until this step stands in the metrics."""
        deadline = time.monotonic() + seconds
        while not any(line["step"] >= step for line in self.metrics() if "time/step" in line):
            assert self.process.poll() is None, self.text
            self.processes()
            assert time.monotonic() < deadline, f"no step {step} within {seconds} s:\n{self.text}"
            time.sleep(0.2)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def last_lines(self) -> str:
        return "\n".join(self.text.splitlines()[-14:])

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def processes(self) -> dict[int, str]:
        """pid → command line of everything alive that the run started, the driver included."""
        psutil.process_iter.cache_clear()  # it would take a reused number for the process that had it before
        alive: dict[int, str] = {}
        ours = {process.pid for process in self._seen if process.is_running()}
        for process in sorted(psutil.process_iter(), key=_begun):  # parents before children
            with suppress(psutil.Error, OSError):
                marked = process.environ().get(MARK) == self.mark or self._writes_our_logs(process)
                if marked or {process.pid, process.ppid()} & ours:
                    self._seen.add(process)
                    ours.add(process.pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        alive[process.pid] = " ".join(process.cmdline()).strip()
        return alive

    def _writes_our_logs(self, process: psutil.Process) -> bool:
        with suppress(OSError):
            return Path(os.readlink(f"/proc/{process.pid}/fd/1")).is_relative_to(self.folder)
        return False

    def pid_of(self, part: str, seconds: float = 60) -> int:
        """The process whose command line contains `part`; it may just be started anew."""
        deadline = time.monotonic() + seconds
        while True:
            alive = self.processes()
            for pid, command in alive.items():
                if part in command:
                    return pid
            assert time.monotonic() < deadline, f"no {part} within {seconds} s among {alive}"
            time.sleep(0.2)

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def end(self) -> None:
        """Whatever a failed test left behind."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)


def _begun(process: psutil.Process) -> float:
    """When it was started; one that has ended meanwhile goes first and is skipped."""
    try:
        return process.create_time()
    except psutil.Error:
        return 0.0

"""Starts the application as its users do, and finds every process that it started."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARK = "POSTTRAIN_TEST_RUN"


class Run:
    """`python -m app` in a process of its own. All its descendants carry a mark in their environment."""

    def __init__(self, folder: Path, *overrides: str):
        self.folder, self.mark = folder / "run", secrets.token_hex(8)
        self.output = folder / "output.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app", *overrides, f"hydra.run.dir={self.folder}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark},
            )

    def wait(self, seconds: float = 280) -> int:
        return self.process.wait(seconds)

    def wait_for_step(self, step: int, seconds: float = 240) -> None:
        """Until this step stands in the metrics."""
        deadline = time.monotonic() + seconds
        while not any(line["step"] >= step for line in self.metrics() if "time/step" in line):
            assert self.process.poll() is None, self.text
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
        """pid → command line of everything alive that carries the mark, the driver included."""
        return {pid: command for pid, command in _marked(f"{MARK}={self.mark}".encode())}

    def pid_of(self, part: str) -> int:
        """The process whose command line contains `part`."""
        return next(pid for pid, command in self.processes().items() if part in command)

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


def _marked(mark: bytes) -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if title.strip():
                    found.append((int(entry.name), title))
        except (OSError, ProcessLookupError):
            continue
    return found

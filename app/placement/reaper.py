"""Ends what a run started when its driver is gone, also when that was killed.

A small process waits for the end of a pipe that the driver holds. Then it kills every process that carries the run's
mark in its environment, which all of them inherited: Ray's, ours, SGLang's. Most of them end by themselves; Ray's
agents may take longer than anybody wants to wait.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "POSTTRAIN_RUN"
ROUNDS = 20
PAUSE_SECONDS = 0.25


@contextmanager
def reaper() -> Iterator[None]:
    """Mark what is started in the block; kill what is left of it when the block or this process ends."""
    os.environ[MARK] = secrets.token_hex(8)
    waiting = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert waiting.stdin is not None
        waiting.stdin.close()
        del os.environ[MARK]
        with suppress(subprocess.TimeoutExpired):
            waiting.wait(ROUNDS * PAUSE_SECONDS)


def marked(mark: str) -> list[int]:
    """Processes of this mark, but for this one."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def main() -> None:
    sys.stdin.buffer.read()  # until the driver closes it, or is no more
    for _ in range(ROUNDS):
        left = marked(os.environ[MARK])
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()

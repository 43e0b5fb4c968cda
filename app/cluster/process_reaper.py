"""Ends what a run started when its driver is gone, also when that was killed.

A small process waits for the end of a pipe that the driver holds. Then it kills every process that carries the run's
mark in its environment, which all of them inherited (Ray's, ours, SGLang's), and every descendant of such a process
that it saw while the driver lived: what sets a title of its own may overwrite its environment, as Ray's agents do. Most
end by themselves; those agents may wait a minute for a server that is gone as well.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

MARK = "POSTTRAIN_RUN"
LOOK_SECONDS = 3.0
ROUNDS = 20
PAUSE_SECONDS = 0.25


@contextmanager
def process_reaper() -> Iterator[None]:
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


def started(mark: str) -> set[psutil.Process]:
    """The processes of this mark and their descendants, but for this one."""
    psutil.process_iter.cache_clear()  # it would take a reused number for the process that had it before
    ours, children = set(), defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            children[process.ppid()].append(process)
            if process.environ().get(MARK) == mark:
                ours.add(process)
    ours.discard(psutil.Process())
    fresh = list(ours)
    while fresh:
        fresh = [child for parent in fresh for child in children[parent.pid] if child not in ours]
        ours.update(fresh)
    return ours


def living(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Those that still run; another process of the same number is not one of them."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def main() -> None:
    mark, seen = os.environ[MARK], set[psutil.Process]()
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:  # the driver closes it, or is no more
        seen = living(seen | started(mark))
    for _ in range(ROUNDS):
        seen = living(seen | started(mark))
        if not seen:
            return
        for process in seen:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()

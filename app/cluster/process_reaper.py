"""Kills the processes of a run when its driver is gone, even if the driver was killed.

A small child process waits until the driver closes a pipe or dies. Then it kills every process with the run's mark in
its environment, which all processes of the run inherit (Ray's, ours, SGLang's). It also kills their descendants that it
found while the driver was running: setting a process title may overwrite the environment, as in Ray's agents. Most
processes exit on their own, but those agents may wait a minute for a server that is gone.
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

from app.utils.process import module_command, package_path

MARK = "POSTTRAIN_RUN"
LOOK_SECONDS = 3.0  # between two scans while the driver runs
ROUNDS = 20  # of killing
PAUSE_SECONDS = 0.25  # between two rounds


@contextmanager
def process_reaper() -> Iterator[None]:
    """Mark the processes started in the block; kill those left when the block or this process ends."""
    os.environ[MARK] = secrets.token_hex(8)
    environment = {**os.environ, "PYTHONPATH": package_path(os.environ.get("PYTHONPATH"))}
    reaper = subprocess.Popen(module_command(__name__), env=environment, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert reaper.stdin is not None
        reaper.stdin.close()
        del os.environ[MARK]
        with suppress(subprocess.TimeoutExpired):
            reaper.wait(ROUNDS * PAUSE_SECONDS)


def marked_processes(mark: str) -> set[psutil.Process]:
    """Return the processes with this mark and their descendants, without the calling process."""
    psutil.process_iter.cache_clear()  # a cached entry of a reused pid would be of the process that had it before

    marked = set()
    children = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            children[process.ppid()].append(process)
            if process.environ().get(MARK) == mark:
                marked.add(process)
    marked.discard(psutil.Process())

    parents = list(marked)
    while parents:
        parents = [child for parent in parents for child in children[parent.pid] if child not in marked]
        marked.update(parents)
    return marked


def alive(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Return the processes that still run. Zombies and reused pids do not count."""
    running = set()
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.add(process)
    return running


def main() -> None:
    """Wait for the driver's end, then kill until nothing is left."""
    mark = os.environ[MARK]
    seen: set[psutil.Process] = set()

    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        seen = alive(seen | marked_processes(mark))

    for _ in range(ROUNDS):
        seen = alive(seen | marked_processes(mark))
        if not seen:
            return
        for process in seen:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()

"""Waiting for a condition instead of a fixed time."""

import time
from collections.abc import Callable

import psutil


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until the condition holds; returns the seconds it took, fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - started


def alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one of this pid, runs; a zombie does not."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

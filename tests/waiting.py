"""Waiting for a condition instead of a fixed time."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until the condition holds; returns the seconds it took, fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - started

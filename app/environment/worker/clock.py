"""The time that an episode spends in its environment's own code, without the time it waits for engines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measures one episode, and each stretch of it between two requests to the policy.

    Args:
        timeout_s: Limit of one stretch, or of one call of `begin`, `step` or `score`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.step = "run"  # what runs now, for people
        self._timeout_s = timeout_s
        self._since = time.monotonic()  # of the current stretch
        self._before = 0.0  # seconds of the earlier ones
        self._requests = 0  # in flight; while there are any, the episode waits

    def begin(self, step: str) -> None:
        """Begin a stretch of its own."""
        self._before = self.seconds
        self._since = time.monotonic()
        self.step = step

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the clock while a request to the policy is in flight."""
        if self._requests == 0:
            self._before = self.seconds
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the environment's own code so far."""
        return self._before + self._stretch

    @property
    def left(self) -> float:
        """Seconds until the current stretch is late; not positive: it is."""
        return self._timeout_s - self._stretch

    @property
    def _stretch(self) -> float:
        return 0.0 if self._requests else time.monotonic() - self._since

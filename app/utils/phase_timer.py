"""Seconds by phase."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter


class PhaseTimer:
    """Sums up seconds by phase. A block that raises counts nothing.

    Example::

        timer = PhaseTimer()
        with timer.phase("gather"):
            ...
        timer.seconds()  # {"gather": 0.12}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._longest: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a phase."""
        started = perf_counter()
        yield
        self._add(name, perf_counter() - started)

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of every phase so far."""
        return self._seconds

    def longest(self, name: str) -> float:
        """Return the seconds of the longest phase of this name, among those that `seconds` has returned."""
        return self._longest[name]

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds
        self._longest[name] = max(self._longest[name], seconds)

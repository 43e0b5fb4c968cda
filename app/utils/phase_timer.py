"""Seconds by phase."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter


class PhaseTimer:
    """Sums up seconds by phase. A block that raises counts nothing."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._longest: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = perf_counter()
        yield
        self.add(name, perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds
        self._longest[name] = max(self._longest[name], seconds)

    def seconds(self) -> Mapping[str, float]:
        return self._seconds

    def longest(self, name: str) -> float:
        """Return the seconds of the longest phase of this name, among those that `seconds` has returned."""
        return self._longest[name]

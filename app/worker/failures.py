"""Counts failures, warns of them, and ends the run when there are too many.

Failures are counted over windows of one step's units. The run ends at the failure that takes a window over its limit,
not at the end of the window, so code that always hangs costs only a fraction of a step of timeouts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from app.errors import RunError


@dataclass(eq=False)
class FailureWindow:
    """Failures of the current window and of the whole run."""

    _phrase: str  # for the error: `episodes failed in every attempt`
    _key: str  # the setting of `_max_fraction`; its section is the prefix of the metrics
    _max_fraction: float
    _window: int  # units per window: those of a step
    _consequence: str  # a sentence for the warnings: what happens to a failed unit
    _warn: Callable[[str], None]
    by_kind: Counter[str] = field(default_factory=Counter)  # counted by the owner; a kind of 0 has a metric, too
    failed: int = 0
    total: int = 0
    last: str = ""  # cause of the last warning or failure, without a period
    _by_source: Counter[str] = field(default_factory=Counter)
    _window_failed: int = 0
    _window_total: int = 0
    _was_full: bool = False  # a window of this step

    def warn(self, source: str, subject: str, why: str) -> None:
        """Warn of the first failure of a source, and then of its 10th, 100th, 1000th …."""
        self.last = why.rstrip(".")
        self._by_source[source] += 1
        count = self._by_source[source]
        if str(count).rstrip("0") == "1":
            times = "" if count == 1 else f" ({count:,} times so far)"
            self._warn(f"{subject} failed{times}: {self.last}. {self._consequence}")

    def count(self, failure: str | None) -> None:
        """Count a unit: why it failed, or None. Raises `RunError` if the window has more failures than allowed."""
        self.total += 1
        self._window_total += 1
        if failure is not None:
            self.failed += 1
            self._window_failed += 1
            self.last = failure.rstrip(".")
            self._check(max(self._window_total, self._window))
        if self._window_total >= self._window:
            self._window_failed = self._window_total = 0
            self._was_full = True

    def end_window(self) -> None:
        """Close the window early, at the end of a step. `RunError` if too large a fraction of it failed.

        What is left after a full window is no fraction of its own: a few failures of few units say little.
        """
        self._check(self._window if self._was_full else self._window_total)
        self._window_failed = self._window_total = 0
        self._was_full = False

    @property
    def metrics(self) -> dict[str, float]:
        """Failures of the whole run by kind, and the failed fraction of all units."""
        section = self._key.partition(".")[0]
        kinds = {f"{section}/failed_{kind}": float(count) for kind, count in sorted(self.by_kind.items())}
        return {**kinds, f"{section}/failed_fraction": self.failed / max(1, self.total)}

    def _check(self, window: int) -> None:
        if self._window_failed > self._max_fraction * window:
            raise RunError(
                f"{self._window_failed} of {self._window_total} {self._phrase}, more than "
                f"{self._key}={self._max_fraction:g} of a step's {window} allows; the last: {self.last}."
            )

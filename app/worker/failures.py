"""Counts failures, warns of them, and ends the run when there are too many.

Failures are counted over windows of one step's units. The run ends at the failure that takes a window over its limit,
not at the end of the window, so code that always hangs costs only a fraction of a step of timeouts.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from app.errors import RunError


class FailureWindow:
    """Failures of the current window and of the whole run.

    Args:
        phrase: For the error: `episodes failed in every attempt`.
        key: The setting of `max_fraction`. Its section is the prefix of the metrics.
        window: Units per window: those of a step.
        consequence: A sentence for the warnings: what happens to a failed unit.
        kinds: Kinds of failures that have a metric before the first one.
    """

    def __init__(
        self,
        phrase: str,
        key: str,
        max_fraction: float,
        window: int,
        *,
        consequence: str,
        warn: Callable[[str], None],
        kinds: Iterable[str] = (),
    ) -> None:
        self.by_kind = Counter(dict.fromkeys(kinds, 0))  # counted by the owner
        self.failed = 0
        self.total = 0
        self.last = ""  # cause of the last warning or failure, without a period
        self._phrase = phrase
        self._key = key
        self._max_fraction = max_fraction
        self._window = window
        self._consequence = consequence
        self._warn = warn
        self._by_source: Counter[str] = Counter()
        self._window_failed = 0
        self._window_total = 0

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

    def end_window(self) -> None:
        """Close the window early, at the end of a step. `RunError` if too large a fraction of it failed."""
        self._check(self._window_total)
        self._window_failed = self._window_total = 0

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

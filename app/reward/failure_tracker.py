"""Counts failed rewards, and says when there are too many.

Judged over windows of a step's size: a run ends at the failure that makes it certain that a window has more failures
than allowed, not at a window's end. So a reward that always hangs costs a fraction of a step of time limits.
"""

from collections import Counter
from collections.abc import Mapping

from app.errors import RunError
from app.reward.outcome import Failure, FailureKind, Value


class FailureTracker:
    """`window` is in trajectories; `max_fraction` of them may fail."""

    def __init__(self, max_fraction: float, window: int) -> None:
        self._max_fraction, self._window = max_fraction, window
        self._scored = self._failed = 0  # in this window
        self._total = 0
        self._kinds: Counter[FailureKind] = Counter()  # in the whole run
        self._last = ""

    def count(self, values: Mapping[str, Value]) -> None:
        """Count a trajectory by its values, one for each part; `RunError` when it was one failure too many."""
        self._scored += 1
        self._total += 1
        for name, value in values.items():
            if isinstance(value, Failure):
                self._failed += 1
                self._kinds[value.kind] += 1
                self._last = f"{name}, {value}"
                break
        self._judge(max(self._scored, self._window))
        if self._scored >= self._window:
            self._scored = self._failed = 0

    def check(self) -> None:
        """End the window early, where a step ends; `RunError` when too large a part of it failed."""
        self._judge(self._scored)
        self._scored = self._failed = 0

    @property
    def failures(self) -> dict[FailureKind, int]:
        """Failed trajectories of the whole run, by kind."""
        return {kind: self._kinds[kind] for kind in FailureKind}

    @property
    def metrics(self) -> dict[str, float]:
        """The same under the names of the log, and as a fraction of all that were scored."""
        counts = {f"reward/failed_{kind.name}": float(count) for kind, count in self.failures.items()}
        return {**counts, "reward/failed_fraction": sum(self._kinds.values()) / max(self._total, 1)}

    def _judge(self, of: int) -> None:
        if self._failed > self._max_fraction * of:
            raise RunError(
                f"The reward failed on {self._failed} of {self._scored} trajectories, more than "
                f"reward.max_failed_fraction={self._max_fraction:g} of a step's {of} allows; "
                f"the last one: part {self._last}."
            )

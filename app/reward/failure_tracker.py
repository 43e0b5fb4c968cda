"""Count failed rewards and stop the run when there are too many.

Failures are counted over windows of one step's trajectories. The run ends at the failure that takes a window over its
limit, not at the end of the window, so a reward that always hangs costs only a fraction of a step of timeouts.
"""

from collections import Counter
from collections.abc import Mapping

from app.errors import RunError
from app.reward.outcome import Failure, FailureKind, Value


class FailureTracker:
    """Failure counts of the current window and of the whole run.

    Args:
        max_fraction: Fraction of a window's trajectories that may fail.
        window: Trajectories per window.
    """

    def __init__(self, max_fraction: float, window: int) -> None:
        self._max_fraction = max_fraction
        self._window = window
        self._window_scored = 0
        self._window_failed = 0
        self._total_scored = 0
        self._total_failed: Counter[FailureKind] = Counter()
        self._last = ""

    def count(self, values: Mapping[str, Value]) -> None:
        """Count one trajectory, given its values by component name.

        Raises:
            RunError: The window now has more failures than allowed.
        """
        self._window_scored += 1
        self._total_scored += 1

        failed = next(((name, value) for name, value in values.items() if isinstance(value, Failure)), None)
        if failed is not None:
            name, failure = failed
            self._window_failed += 1
            self._total_failed[failure.kind] += 1
            self._last = f"{name}, {failure}"

        self._check_limit(max(self._window_scored, self._window))
        if self._window_scored >= self._window:
            self._reset_window()

    def check(self) -> None:
        """Close the window early, at the end of a step. `RunError` if too large a fraction of it failed."""
        self._check_limit(self._window_scored)
        self._reset_window()

    @property
    def failures(self) -> dict[FailureKind, int]:
        """Failed trajectories of the whole run, by kind."""
        return {kind: self._total_failed[kind] for kind in FailureKind}

    @property
    def metrics(self) -> dict[str, float]:
        """`failures` as metrics, plus the failed fraction of all scored trajectories."""
        counts = {f"reward/failed_{kind.name}": float(count) for kind, count in self.failures.items()}
        return {**counts, "reward/failed_fraction": self._total_failed.total() / max(self._total_scored, 1)}

    def _check_limit(self, window: int) -> None:
        if self._window_failed > self._max_fraction * window:
            raise RunError(
                f"The reward failed on {self._window_failed} of {self._window_scored} trajectories, more than "
                f"reward.max_failed_fraction={self._max_fraction:g} of a step's {window} allows; "
                f"last failure: component {self._last}."
            )

    def _reset_window(self) -> None:
        self._window_scored = 0
        self._window_failed = 0

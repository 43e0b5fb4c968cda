"""Count failed rewards, say so, and stop the run when there are too many.

Failures are counted over windows of one step's trajectories. The run ends at the failure that takes a window over its
limit, not at the end of the window, so a reward that always hangs costs only a fraction of a step of timeouts.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from app.errors import RunError
from app.reward.outcome import Failure, FailureKind, Value


class FailureTracker:
    """Failure counts of the current window and of the whole run.

    A component's first failure is a warning, and then its 10th, 100th, 1000th …, with their share.

    Args:
        max_fraction: Fraction of a window's trajectories that may fail.
        window: Trajectories per window.
        warn: Shows a warning.
    """

    def __init__(self, max_fraction: float, window: int, warn: Callable[[str], None]) -> None:
        self._max_fraction = max_fraction
        self._window = window
        self._warn = warn
        self._window_scored = 0
        self._window_failed = 0
        self._total_scored = 0
        self._total_failed: Counter[FailureKind] = Counter()
        self._failed_by_component: Counter[str] = Counter()
        self._last = ""

    def count(self, values: Mapping[str, Value]) -> None:
        """Count one trajectory, given its values by component name.

        Raises:
            RunError: The window now has more failures than allowed.
        """
        self._window_scored += 1
        self._total_scored += 1

        failed = {name: value for name, value in values.items() if isinstance(value, Failure)}
        for name, failure in failed.items():
            self._say(name, failure)
        if failed:
            name, failure = next(iter(failed.items()))
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

    def _say(self, name: str, failure: Failure) -> None:
        self._failed_by_component[name] += 1
        count = self._failed_by_component[name]

        if count == 1:
            self._warn(
                f"reward component {name} failed: {failure}. A failed trajectory scores 0; above "
                f"reward.max_failed_fraction={self._max_fraction:g} of a step the run stops. All failures are in "
                "logs/reward.log."
            )
        elif _is_power_of_ten(count):
            share = count / self._total_scored
            self._warn(
                f"reward component {name} failed on {count:,} of {self._total_scored:,} trajectories ({share:.1%}), "
                f"which scored 0; the last: {failure}."
            )

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


def _is_power_of_ten(count: int) -> bool:
    return str(count).rstrip("0") == "1"

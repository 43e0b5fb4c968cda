"""Counts episodes that failed, says so, and ends the run when there are too many.

An episode that failed for good has no reward: it leaves its group.
"""

from collections import Counter
from collections.abc import Callable

from app.errors import RunError
from app.worker.wire import Failed


class EpisodeFailures:
    """Failures of a window of episodes and of the whole run.

    Args:
        max_fraction: Fraction of a window's episodes that may fail for good.
        window: Episodes per window: those of a step.
        warn: Shows a warning.

    Attributes:
        by_kind: Attempts that failed so far, by kind.
        lost: Episodes that failed for good, so far.
        total: Episodes that ended or failed for good, so far.
        last: Why the last attempt failed, without a period; empty if none has.
    """

    def __init__(self, max_fraction: float, window: int, warn: Callable[[str], None]):
        self._max_fraction = max_fraction
        self._window = window
        self._warn = warn
        self._ended = 0  # in this window
        self._failed = 0
        self.by_kind: Counter[str] = Counter()
        self.lost = 0
        self.total = 0
        self.last = ""

    def attempt_failed(self, failed: Failed) -> None:
        """Count one attempt; the first of each kind is a warning, and then its 10th, 100th, …."""
        self.by_kind[failed.kind] += 1
        self.last = failed.text.rstrip(".")
        count = self.by_kind[failed.kind]
        if str(count).rstrip("0") == "1":
            times = "" if count == 1 else f" ({count:,} times so far)"
            self._warn(
                f"an episode failed{times}: {_sentence(failed)} It is played again, at most environment.retries times, "
                "and then left out of its group; all failures are in logs/environment.log."
            )

    def ended(self, failed: Failed | None) -> None:
        """Count an episode that ended well (None), or failed in its last attempt.

        Raises:
            RunError: The window has more failed episodes than allowed.
        """
        self._ended += 1
        self.total += 1
        if failed is not None:
            self._failed += 1
            self.lost += 1
            if self._failed > self._max_fraction * max(self._window, self._ended):
                raise RunError(
                    f"{self._failed} of {self._ended} episodes failed in every attempt, more than "
                    f"environment.max_failed_fraction={self._max_fraction:g} of a step's {self._window} allows; the "
                    f"last: {_sentence(failed)}"
                )
        if self._ended >= self._window:
            self._ended = self._failed = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of the whole run so far."""
        kinds = {f"environment/failed_{kind}": float(count) for kind, count in sorted(self.by_kind.items())}
        return {
            "environment/failed_episodes": float(self.lost),
            "environment/failed_fraction": self.lost / max(1, self.total),
            **kinds,
        }


def _sentence(failed: Failed) -> str:
    return f"{failed.text.rstrip('.')}."

"""Ends a step before its next pass, after the same pass on every rank.

    driver                               rank
    `hold` on every rank          ──→    no further pass begins; returns how many have begun
    `stop_after` their maximum    ──→    passes up to that one begin, the next one raises

A pass is full of collectives: a rank that left before a pass that another one has begun would leave it stuck there. The
ranks agree through the driver, so a pass costs no collective of its own.
"""

import math
import threading

from app.errors import TrainerError

HOLD_TIMEOUT_S = 60.0  # of a rank that was held, for the driver's second call


class PassGate:
    """One rank's gate. The thread of the step calls `enter`, another one `hold` and `stop_after`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Forget the passes of the last step and whether it was ended."""
        with self._changed:
            self._begun = 0
            self._limit: float | None = math.inf  # passes that may begin; None: held
            self._updating = False

    def enter(self, *, update: bool = False) -> None:
        """Begin a pass or an update, after which the step goes on to its end. Raises `TrainerError` if it ends here."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._limit is not None, HOLD_TIMEOUT_S):
                raise TrainerError(f"the driver did not say within {HOLD_TIMEOUT_S:.0f} s where the step ends")
            if self._limit is not None and self._begun >= self._limit:
                raise TrainerError(f"the step was ended after {self._begun} passes")
            self._begun += 1
            if update:
                self._updating = True
                self._limit = math.inf

    def hold(self) -> int:
        """Let no further pass begin, for now. Returns how many have begun."""
        with self._changed:
            if not self._updating:
                self._limit = None
            return self._begun

    def stop_after(self, passes: int) -> None:
        """End the step after this many passes."""
        with self._changed:
            if not self._updating:
                self._limit = passes
            self._changed.notify_all()

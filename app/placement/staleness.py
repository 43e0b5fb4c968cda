"""Admission control: how many groups may be dispatched, so that staleness is bounded and nothing deadlocks.

In groups, with the last SYNCED version v, staleness bound S and P prompts per step:

    begun    = accepted + in flight
    capacity = min(max in flight − in flight, (S + v + 1) · P − begun, all groups still needed − begun)

Invariants:
    - Every dispatched group ends exactly once: accepted or released.
    - An accepted group that is too stale when taken (`producer.py`) is returned, which frees its capacity.

The formula is AReaL's (arXiv 2505.24298, section 5.1).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class StalenessManager:
    """Counts groups in flight and accepted groups.

    Example (P=8, S=2, version 3):
        staleness = StalenessManager.at(3, prompts_per_step=8, max_staleness=2, max_in_flight=100, last_step=50)
        staleness.capacity    # (2 + 3 + 1) · 8 − 3 · 8 = 24
        staleness.dispatch()  # in_flight 1, capacity 23
        staleness.accept()    # in_flight 0, accepted 25, capacity 23
    """

    prompts_per_step: int  # P
    max_staleness: int  # S, in syncs
    max_in_flight: int  # groups
    last_step: int  # no groups are needed after this version
    version: int = 0  # synced last
    accepted: int = 0  # groups that are, or were, in the buffer
    in_flight: int = 0  # groups being sampled or scored
    dispatch_open: bool = True

    @classmethod
    def at(
        cls, version: int, *, prompts_per_step: int, max_staleness: int, max_in_flight: int, last_step: int
    ) -> "StalenessManager":
        """Create the state of a run at `version`. Groups of earlier steps count as accepted."""
        return cls(prompts_per_step, max_staleness, max_in_flight, last_step, version, version * prompts_per_step)

    @property
    def capacity(self) -> int:
        """Groups that may be dispatched now."""
        if not self.dispatch_open:
            return 0
        begun = self.accepted + self.in_flight
        fresh = (self.max_staleness + self.version + 1) * self.prompts_per_step - begun
        needed = self.last_step * self.prompts_per_step - begun
        return max(0, min(self.max_in_flight - self.in_flight, fresh, needed))

    def dispatch(self) -> None:
        """Count a group that is sent to the engines."""
        assert self.capacity > 0, "dispatched without capacity"
        self.in_flight += 1

    def accept(self) -> None:
        """Count a dispatched group that enters the buffer."""
        self.in_flight -= 1
        self.accepted += 1

    def release(self) -> None:
        """Count a dispatched group that ends unused: failed, filtered or aborted."""
        self.in_flight -= 1

    def return_accepted(self, groups: int) -> None:
        """Take back accepted groups that were too stale to be trained on."""
        self.accepted -= groups

    def on_weights_synced(self, version: int, *, missing: int = 0) -> None:
        """Record a sync. `missing`: groups that its step lacked; they are no longer needed."""
        self.version = version
        self.accepted += missing

    def is_fresh(self, oldest_version: int) -> bool:
        """Whether a group whose oldest token is of this version may be trained on."""
        return self.version - oldest_version <= self.max_staleness

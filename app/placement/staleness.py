"""How many groups may be begun: the admission that makes staleness a bound and never a deadlock.

In groups, with the last PUSHED version v, staleness bound S and P prompts a step:

    capacity = min(room in flight, (S + v + 1) · P − (accepted + in flight), all still needed − (accepted + in flight))

What always holds: every group that was dispatched ends exactly once, as accepted or as released; what was accepted and
could not be used after all is returned, which makes room for another. The formula is AReaL's (arXiv 2505.24298, 5.1).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class StalenessManager:
    prompts_per_step: int  # P
    max_staleness: int  # S, pushes
    max_in_flight: int  # groups
    last_step: int  # the version after which nothing is needed
    version: int = 0  # pushed last
    accepted: int = 0  # groups that are, or were, in the buffer
    in_flight: int = 0  # groups being sampled or scored
    dispatch_open: bool = True

    @classmethod
    def at(
        cls, version: int, *, prompts_per_step: int, max_staleness: int, max_in_flight: int, last_step: int
    ) -> "StalenessManager":
        """Admission of a run that stands at `version`: what was trained to get there counts as accepted."""
        return cls(prompts_per_step, max_staleness, max_in_flight, last_step, version, version * prompts_per_step)

    @property
    def capacity(self) -> int:
        """How many groups may be dispatched now."""
        if not self.dispatch_open:
            return 0
        begun = self.accepted + self.in_flight
        fresh = (self.max_staleness + self.version + 1) * self.prompts_per_step - begun
        needed = self.last_step * self.prompts_per_step - begun
        return max(0, min(self.max_in_flight - self.in_flight, fresh, needed))

    @property
    def starved(self) -> bool:
        """Nothing is being sampled and nothing may be begun."""
        return self.in_flight == 0 and self.capacity == 0

    def dispatch(self) -> None:
        assert self.capacity > 0, "dispatched without capacity"
        self.in_flight += 1

    def accept(self) -> None:
        """A dispatched group goes into the buffer."""
        self.in_flight -= 1
        self.accepted += 1

    def release(self) -> None:
        """A dispatched group ends without being used: failed, filtered, aborted."""
        self.in_flight -= 1

    def give_back(self, groups: int) -> None:
        """Accepted groups could not be used after all: too stale when taken."""
        self.accepted -= groups

    def push(self, version: int, *, missing: int = 0) -> None:
        """Policy `version` was pushed; its step ended `missing` groups short, which nobody will wait for any more."""
        self.version = version
        self.accepted += missing

    def is_fresh(self, oldest_version: int) -> bool:
        """Whether tokens of this version may still be trained on."""
        return self.version - oldest_version <= self.max_staleness

"""How many groups are in flight at most, and fewer where engines retract requests over and over.

An engine whose KV cache is full retracts requests, and computes their cache again later. The groups of a step are in
flight in any case: one that is held back waits for the longest completion of another, while engines queue requests.
"""

from collections.abc import Callable

from app.config import RunConfig
from app.rollout.requests import Requests

RETRACTED = 0.1  # retractions per completion of a step, above which the caches are too full
PATIENCE = 2  # steps in a row
LOWERED = 0.8  # of the groups in flight


class Concurrency:
    """The groups in flight. `adapts`: `rollout.max_inflight_groups` is null, so that the number may be lowered."""

    def __init__(self, config: RunConfig, warn: Callable[[str], None], *, adapts: bool):
        self.groups = config.groups_in_flight
        self._least = min(self.groups, config.algorithm.prompts_per_step) if adapts else self.groups
        self._warn = warn
        self._warned = False  # that the number stays
        self._full_steps = 0  # in a row
        self._before = (0, 0)  # completions and retractions of all earlier steps

    def end_step(self, requests: Requests) -> dict[str, float]:
        """Lower the number if two steps in a row had too many retractions. Returns the metrics of the step."""
        completions, retractions = requests.completions - self._before[0], requests.retractions - self._before[1]
        self._before = (requests.completions, requests.retractions)

        self._full_steps = self._full_steps + 1 if retractions > RETRACTED * completions else 0
        lowered = max(int(LOWERED * self.groups), self._least)
        if self._full_steps >= PATIENCE and not (self._warned and lowered == self.groups):
            now = "stay in flight" if lowered == self.groups else f"are in flight from now on, instead of {self.groups}"
            self._warn(
                f"engines retracted requests {retractions} times in a step of {completions} completions, the second "
                f"such step in a row: their KV caches are full. {lowered} groups {now}; a larger "
                "rollout.memory_fraction or a smaller rollout.max_inflight_groups makes room"
            )
            self._warned = lowered == self.groups
            self.groups, self._full_steps = lowered, 0
        return {"rollout/retractions": float(retractions)}

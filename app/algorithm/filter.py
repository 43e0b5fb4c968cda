"""Which groups are trained on, and what became of the others. Both placements use it."""

from dataclasses import dataclass, field

from app.config.algorithm import AlgorithmConfig
from app.types import Group


@dataclass(slots=True)
class RolloutCounts:
    """Groups since the last step that were filtered, dropped, aborted or retried."""

    filtered: list[Group] = field(default_factory=list)  # by dynamic sampling
    dropped: int = 0  # too stale when taken
    aborted: int = 0  # too stale while in flight
    failed: int = 0  # lost to an engine and sent again
    unplayable: list[str] = field(default_factory=list)  # ids of prompts whose environments left too few members
    discarded_tokens: int = 0  # completion tokens of dropped, aborted and unplayable groups

    def keep(self, group: Group, algorithm: AlgorithmConfig) -> bool:
        """Whether to train on a group; counts it otherwise.

        Rejected are groups of too few members, and with dynamic sampling (DAPO, section 3.2) those whose raw rewards
        are all equal: shaped rewards would hide that all answers are right or all wrong.
        """
        if len(group.trajectories) < algorithm.smallest_group:
            self.unplayable.append(group.prompt.id)
            self.discarded_tokens += group.completion_tokens
            return False

        if algorithm.dynamic_sampling and group.rewards.min() == group.rewards.max():
            self.filtered.append(group)
            return False
        return True

"""The line of a step, put together in one place for both placements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.algorithm.metrics import advantage_metrics, group_metrics, staleness_metrics
from app.types import Group, ScoredGroup, StepReport, SyncReport


@dataclass(slots=True)
class RolloutCounts:
    """What happened to groups since the last step, besides being trained on."""

    filtered: list[Group] = field(default_factory=list)  # by dynamic sampling
    dropped: int = 0  # too stale when taken
    aborted: int = 0  # too stale while in flight
    failed: int = 0  # lost to an engine, sent again

    def take(self) -> "RolloutCounts":
        """What it holds, and begin anew."""
        now = RolloutCounts(self.filtered, self.dropped, self.aborted, self.failed)
        self.filtered, self.dropped, self.aborted, self.failed = [], 0, 0, 0
        return now


def step_metrics(
    scored: Sequence[ScoredGroup],
    tally: RolloutCounts,
    report: StepReport,
    sync: SyncReport,
    seconds: Mapping[str, float],
    *,
    trained_version: int,
) -> dict[str, float]:
    """All metrics of a step. `seconds` has `step` (wall clock) and its phases.

    Rewards, lengths and tokens are those of the groups that were trained on and of those that were filtered out;
    staleness and advantages those of the trained ones.
    """
    groups = [each.group for each in scored]
    seen = groups + tally.filtered
    measured = group_metrics(seen) if seen else {"tokens/completion": 0.0}
    stale = {**staleness_metrics(groups, trained_version), **advantage_metrics(scored)} if groups else {}
    return {
        "policy_version": float(report.version),
        **measured,
        **stale,
        "rollout/groups": float(len(groups)),
        "rollout/filtered_groups": float(len(tally.filtered)),
        "rollout/dropped_groups": float(tally.dropped),
        "rollout/aborted_groups": float(tally.aborted),
        "rollout/failed_groups": float(tally.failed),
        **report.metrics,
        **sync.metrics,
        **{f"time/{phase}": value for phase, value in seconds.items()},
        "throughput/completion_tokens_per_second": measured["tokens/completion"] / seconds["step"],
    }

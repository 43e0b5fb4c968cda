"""The metrics of one step, assembled in one place for both placements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.algorithm.metrics import advantage_metrics, group_metrics, source_metrics, staleness_metrics
from app.environment.episode_metrics import environment_metrics
from app.types import Group, ScoredGroup, StepReport, SyncReport


@dataclass(slots=True)
class RolloutCounts:
    """Groups since the last step that were filtered, dropped, aborted or retried."""

    filtered: list[Group] = field(default_factory=list)  # by dynamic sampling
    dropped: int = 0  # too stale when taken
    aborted: int = 0  # too stale while in flight
    failed: int = 0  # lost to an engine and sent again
    unplayable: list[str] = field(default_factory=list)  # ids of prompts whose environments left too few members
    discarded_tokens: int = 0  # completion tokens of dropped, aborted and unplayable groups


def step_metrics(
    scored: Sequence[ScoredGroup],
    counts: RolloutCounts,
    report: StepReport,
    sync: SyncReport,
    seconds: Mapping[str, float],
    *,
    trained_version: int,
) -> dict[str, float]:
    """Assemble all metrics of a step.

    Rewards, lengths and tokens cover trained and filtered groups; staleness and advantages cover trained groups.

    Args:
        scored: The groups that were trained on.
        counts: Groups that were filtered, dropped, aborted or retried.
        report: The trainer's report.
        sync: The weight sync's report.
        seconds: Wall-clock seconds of the `step` and of its phases.
        trained_version: The policy version that was trained, for staleness.
    """
    groups = [each.group for each in scored]
    sampled = groups + counts.filtered

    metrics = {"policy_version": float(report.version), "tokens/completion": 0.0}
    if sampled:
        metrics |= group_metrics(sampled) | source_metrics(sampled) | environment_metrics(sampled)
    if groups:
        metrics |= staleness_metrics(groups, trained_version)
        metrics |= advantage_metrics(scored)

    metrics["rollout/groups"] = float(len(groups))
    metrics["rollout/filtered_groups"] = float(len(counts.filtered))
    metrics["rollout/dropped_groups"] = float(counts.dropped)
    metrics["rollout/aborted_groups"] = float(counts.aborted)
    metrics["rollout/failed_groups"] = float(counts.failed)
    metrics["rollout/unplayable_groups"] = float(len(counts.unplayable))
    metrics["rollout/discarded_tokens"] = float(counts.discarded_tokens)
    completion_tokens = metrics["tokens/completion"] + counts.discarded_tokens
    metrics["rollout/discarded_fraction"] = counts.discarded_tokens / max(1.0, completion_tokens)

    metrics |= report.metrics
    metrics |= sync.metrics
    metrics |= {f"time/{phase}": value for phase, value in seconds.items()}
    metrics["throughput/completion_tokens_per_second"] = metrics["tokens/completion"] / seconds["step"]
    return metrics

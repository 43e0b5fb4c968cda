"""The metrics of one step, assembled in one place for both placements."""

from collections.abc import Mapping, Sequence

import numpy as np

from app.algorithm.filter import RolloutCounts
from app.algorithm.metrics import advantage_metrics, group_metrics, source_metrics, staleness_metrics
from app.types import Ending, Episode, Group, InFlight, ScoredGroup, StepReport, SyncReport

OF_REQUESTS = {"prompt_tokens", "cached_tokens", "verify_passes"}
OWN_METRICS = {"turns", "sequences", "wall_seconds", "engine_seconds", "observation_tokens", "seconds", *OF_REQUESTS}
TOOL_CALLS, TOOL_FAILURES = "tool_calls", "tool_failures"


def step_metrics(
    scored: Sequence[ScoredGroup],
    counts: RolloutCounts,
    report: StepReport,
    sync: SyncReport,
    seconds: Mapping[str, float],
    *,
    trained_version: int,
    in_flight: InFlight,
) -> dict[str, float]:
    """Assemble all metrics of a step, which trained `trained_version`. `in_flight`: of requests at a sync.

    Rewards, lengths and tokens cover trained and filtered groups; staleness and advantages cover trained groups.
    """
    groups = [each.group for each in scored]
    sampled = groups + counts.filtered

    metrics = {"policy_version": float(report.version), "tokens/completion": 0.0}
    if sampled:
        metrics |= group_metrics(sampled) | source_metrics(sampled) | environment_metrics(sampled)
    if groups:
        metrics |= staleness_metrics(groups, trained_version)
        metrics |= advantage_metrics(scored)

    retracted = in_flight is InFlight.retract
    metrics["rollout/recomputed_tokens"] = float(recomputed_tokens(groups)) if retracted else 0.0
    metrics["rollout/groups"] = float(len(groups))
    metrics["rollout/filtered_groups"] = float(len(counts.filtered))
    metrics["rollout/dropped_groups"] = float(counts.dropped)
    metrics["rollout/aborted_groups"] = float(counts.aborted)
    metrics["rollout/failed_groups"] = float(counts.failed)
    metrics["rollout/unplayable_groups"] = float(len(counts.unplayable))
    metrics["rollout/discarded_tokens"] = float(counts.discarded_tokens)
    completion_tokens = metrics["tokens/completion"] + counts.discarded_tokens
    metrics["rollout/discarded_fraction"] = counts.discarded_tokens / max(1.0, completion_tokens)

    drafted = [each for group in sampled for each in group.trajectories if each.verify_passes]
    if drafted:
        passes = sum(each.verify_passes for each in drafted)
        first_tokens = sum(1 if each.episode is None else each.episode.metrics["turns"] for each in drafted)
        metrics["rollout/accept_length"] = (sum(each.sampled_tokens for each in drafted) - first_tokens) / passes

    metrics |= report.metrics
    metrics |= sync.metrics
    metrics |= {f"time/{phase}": value for phase, value in seconds.items()}
    metrics["throughput/completion_tokens_per_second"] = metrics["tokens/completion"] / seconds["step"]
    return metrics


def recomputed_tokens(groups: Sequence[Group]) -> int:
    """Count the tokens before each change of policy, whose KV cache was computed again.

    After a prompt of 100 tokens and 20 that policy 3 sampled, policy 4 recomputes 120. An upper bound, since the
    members of a group may share their prompt.
    """
    total = 0
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.episode is None and len(trajectory.completion.spans) == 1:  # the usual case
                continue
            for sequence in trajectory.sequences:
                positions = sequence.sampled.nonzero()[0]
                total += sum(int(positions[span.start]) for span in sequence.spans[1:] if span.start < span.end)
    return total


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Measure the episodes of a step's groups; nothing for single turns.

    Means are over trajectories. What an environment counted itself (`policy.count`) is a mean too, under its name.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    episodes = [trajectory.episode for trajectory in trajectories if trajectory.episode is not None]
    if not episodes:
        return {}

    observed = [trajectory.response_tokens - trajectory.sampled_tokens for trajectory in trajectories]
    wall = _total(episodes, "wall_seconds")
    calls = _total(episodes, TOOL_CALLS)
    return {
        **_counted(episodes),
        **_scores(episodes),
        "environment/turns_mean": _total(episodes, "turns") / len(episodes),
        "environment/turns_max": max(episode.metrics.get("turns", 0.0) for episode in episodes),
        "environment/sequences_mean": _total(episodes, "sequences") / len(episodes),
        "environment/observation_tokens": float(np.mean(observed)),
        "environment/tool_calls": calls / len(episodes),
        "environment/tool_failed_fraction": _total(episodes, TOOL_FAILURES) / calls if calls else 0.0,
        "environment/out_of_turns_fraction": _ended(episodes, Ending.turns),
        "environment/out_of_time_fraction": _ended(episodes, Ending.time),
        "environment/seconds": wall / len(episodes),
        # Of an episode's time, in which no engine worked for it.
        "environment/wait_fraction": max(0.0, 1 - _total(episodes, "engine_seconds") / wall) if wall else 0.0,
        # Of the tokens that requests began with, those that the engine had in its KV cache.
        "rollout/cached_fraction": _total(episodes, "cached_tokens") / max(1.0, _total(episodes, "prompt_tokens")),
    }


def _total(episodes: Sequence[Episode], name: str) -> float:
    return sum(episode.metrics.get(name, 0.0) for episode in episodes)


def _ended(episodes: Sequence[Episode], ending: Ending) -> float:
    return sum(episode.ending is ending for episode in episodes) / len(episodes)


def _scores(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean of each score over the episodes that have it, if environments give more than one."""
    names = dict.fromkeys(name for episode in episodes for name in episode.scores)
    if len(names) < 2:
        return {}
    return {
        f"environment/score_{name}": float(np.mean([each.scores[name] for each in episodes if name in each.scores]))
        for name in names
    }


def _counted(episodes: Sequence[Episode]) -> dict[str, float]:
    names = sorted({name for each in episodes for name in each.metrics} - OWN_METRICS - {TOOL_CALLS, TOOL_FAILURES})
    return {f"environment/{name}": _total(episodes, name) / len(episodes) for name in names}

"""The metrics of a step that no run on a CPU has."""

from dataclasses import replace

from app.algorithm.filter import RolloutCounts
from app.config.placement import InFlight
from app.placement.step_metrics import step_metrics
from app.types import Group, ScoredGroup, StepReport, SyncReport
from tests.algorithm.groups import group


def measured(*groups: Group) -> dict[str, float]:
    scored = [ScoredGroup(each, each.rewards.astype("float32")) for each in groups]
    report, sync = StepReport(1, 1, {}), SyncReport(1, 0, 1, {"total": 1.0}, False, 0, None)
    seconds = {"step": 1.0}
    return step_metrics(scored, RolloutCounts(), report, sync, seconds, trained_version=0, in_flight=InFlight.retract)


def test_the_accept_length_is_tokens_over_the_passes_that_verified_drafts() -> None:
    drafted = group([0.0, 1.0, 1.0], lengths=[10, 2, 1])
    passes = (3, 2, 0)  # a single token is sampled with the prompt
    drafted = Group(
        drafted.prompt,
        tuple(
            replace(each, completion=replace(each.completion, verify_passes=count))
            for each, count in zip(drafted.trajectories, passes, strict=True)
        ),
    )
    assert measured(drafted, group([0.0, 1.0], lengths=[7, 7]))["rollout/accept_length"] == 12 / 5
    assert "rollout/accept_length" not in measured(group([0.0, 1.0]))

"""Both placements with episodes of random turns, delays and failures, in virtual time."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import RunConfig
from app.config.placement import PlacementKind, Stream
from app.environment.protocol import Task
from app.errors import RunError
from app.types import InFlight
from tests.simulated_environments import Script, SimEnvironments, SimSession, scripts
from tests.simulation import World, config, long_tailed, now, play


def training(world: World) -> list[SimSession]:
    return [session for session in world.environments.sessions if session.task.training]


def assert_each_group_ended_once(world: World) -> None:
    """Every group that began was trained on or settled, or its prompt is returned to be sampled again."""
    trained = world.trainer.ids
    assert len(trained) == len(set(trained))
    settled = [prompt_id for _, _, filtered in world.recorder.ledger for prompt_id in filtered]
    returned = set(world.cursor.state()["returned"])
    begun = {session.task.id for session in training(world)}
    assert begun == set(trained) | set(settled) | (returned & begun)
    assert not set(trained) & (set(settled) | returned)
    assert not set(settled) & returned


def assert_each_episode_ended_once(world: World) -> None:
    assert world.environments.open == []
    assert {session.closed for session in world.environments.sessions} == {1}


@st.composite
def schedules(draw: st.DrawFn) -> tuple[RunConfig, SimEnvironments]:
    staleness = draw(st.integers(0, 2))
    kind = draw(st.sampled_from(PlacementKind))
    chosen = staleness > 0 and kind is PlacementKind.fully_async
    made = config(
        kind,
        steps=draw(st.integers(1, 5)),
        prompts_per_step=draw(st.integers(1, 4)),
        max_staleness=staleness,
        in_flight=draw(st.sampled_from(InFlight)) if chosen else None,
        max_inflight_groups=draw(st.integers(1, 12)),
        stream=draw(st.sampled_from([Stream.auto, Stream.off])),
        every=draw(st.integers(0, 2)),
        max_completion_tokens=draw(st.sampled_from([9, 64])),
    )
    made.algorithm.max_refill_rounds = 20
    made.environment.max_failed_fraction = 1.0
    made.environment.retries = draw(st.integers(0, 1))
    failing = draw(st.sampled_from([0.0, 0.1, 0.3]))
    return made, SimEnvironments(scripts(draw(st.integers(0, 999)), failing=failing))


@settings(max_examples=25, deadline=None)
@given(schedules())
def test_any_run_ends_within_its_bound_and_every_episode_and_group_ends_once(
    tmp_path_factory: pytest.TempPathFactory, schedule: tuple[RunConfig, SimEnvironments]
) -> None:
    made, environments = schedule
    world = World(made, tmp_path_factory.getbasetemp(), long_tailed(5), environments=environments)
    play(world)
    assert len(world.trainer.ids) == made.steps * made.algorithm.prompts_per_step
    for version, groups in world.trainer.trained:
        assert all(len(group.trajectories) == 2 for group in groups)
        assert all(version - group.oldest_version <= made.placement.max_staleness for group in groups)
    assert_each_episode_ended_once(world)
    assert_each_group_ended_once(world)


ASYNC = PlacementKind.fully_async


@pytest.mark.parametrize(("kind", "in_flight"), [*((ASYNC, each) for each in InFlight), (PlacementKind.colocate, None)])
def test_an_episode_that_outlives_pushes_has_tokens_of_several_versions(
    tmp_path: Path, kind: PlacementKind, in_flight: InFlight | None
) -> None:
    made = config(kind, steps=12, max_staleness=2, in_flight=in_flight, max_inflight_groups=12)
    environments = SimEnvironments(lambda task, number: Script(turns=4, seconds=1.0, score=float(number % 2)))
    world = World(made, tmp_path, long_tailed(3), environments=environments)
    play(world)
    groups = [group for _, groups in world.trainer.trained for group in groups]
    spans = [trajectory.sequences[0].spans for group in groups for trajectory in group.trajectories]
    assert max(map(len, spans)) > 1
    assert all(one.version < other.version for each in spans for one, other in pairwise(each))
    assert max(line["staleness/max"] for line in world.recorder.lines) <= 2
    assert max(line["staleness/max"] for line in world.recorder.lines) > 0


def test_a_push_aborts_an_episode_that_is_inside_its_environment_and_would_be_too_stale(tmp_path: Path) -> None:
    def script(task: object, number: int) -> Script:
        slow = str(task.id).split("@")[0] in ("sim/3", "sim/9")  # type: ignore[attr-defined]
        return Script(turns=2, seconds=50.0 if slow else 0.1, score=float(number % 2), first=0.1)

    made = config(steps=10, max_staleness=1, in_flight=InFlight.retract, max_inflight_groups=12)
    world = World(made, tmp_path, lambda prompt_id: 0.5, environments=SimEnvironments(script))
    play(world)
    ended = Counter(session.ended for session in training(world) if session.script.seconds == 50.0)
    assert ended["aborted"] > 0
    assert sum(line["rollout/aborted_groups"] for line in world.recorder.lines) > 0
    assert_each_episode_ended_once(world)
    assert_each_group_ended_once(world)


@pytest.mark.parametrize("kind", PlacementKind)
def test_a_group_that_environments_left_too_small_is_settled_and_another_is_sampled(
    tmp_path: Path, kind: PlacementKind
) -> None:
    broken = ("sim/3", "sim/9", "sim/20")

    def script(task: object, number: int) -> Script:
        fails = str(task.id).split("@")[0] in broken  # type: ignore[attr-defined]
        return Script(fails_at=1 if fails else None, score=float(number % 2))

    made = config(kind, steps=10, max_inflight_groups=12)
    made.environment.max_failed_fraction = 1.0
    world = World(made, tmp_path, long_tailed(3), environments=SimEnvironments(script))
    play(world)
    settled = [prompt_id.split("@")[0] for _, _, filtered in world.recorder.ledger for prompt_id in filtered]
    assert settled
    assert set(settled) <= set(broken)
    assert sum(line["rollout/unplayable_groups"] for line in world.recorder.lines) == len(settled)
    assert [line["rollout/groups"] for line in world.recorder.lines] == [4.0] * 10
    assert world.recorder.lines[-1]["environment/failed_raised"] >= 2 * 2 * len(settled)
    assert_each_group_ended_once(world)


def test_an_evaluation_in_which_every_episode_failed_ends_the_run_with_its_name(tmp_path: Path) -> None:
    environments = SimEnvironments(lambda task, number: Script(fails_at=None if task.training else 0))
    made = config(PlacementKind.colocate)
    made.environment.max_failed_fraction = 1.0
    world = World(made, tmp_path, environments=environments)
    with pytest.raises(RunError, match="set eval failed"):
        play(world)


def never_ends(task: object, number: int) -> Script:
    assert number < 4000, "the run goes on although every episode fails"
    return Script(fails_at=0)


@pytest.mark.parametrize("kind", PlacementKind)
def test_a_run_whose_every_episode_may_fail_ends_and_names_the_environment(tmp_path: Path, kind: PlacementKind) -> None:
    made = config(kind, steps=30, max_refill_rounds=2)
    made.environment.max_failed_fraction = 1.0
    world = World(made, tmp_path, environments=SimEnvironments(never_ends))
    with pytest.raises(RunError) as ended:
        play(world)

    # 3 rounds of 4 prompts in each of 3 steps; in fully_async those in flight end too
    lost = {session.task.id for session in training(world)}
    in_flight = 0 if kind is PlacementKind.colocate else 3 * made.groups_in_flight
    assert 36 <= len(lost) <= 36 + in_flight
    assert [line["rollout/groups"] for line in world.recorder.lines] == [0.0, 0.0]
    assert all(12 <= line["rollout/unplayable_groups"] <= 12 + in_flight for line in world.recorder.lines)
    assert "unplayable" in str(ended.value)
    assert "on purpose" in str(ended.value)
    assert "dynamic_sampling" not in str(ended.value)
    assert "filtered" not in str(ended.value)
    assert_each_episode_ended_once(world)


def test_an_outage_of_the_environments_uses_up_no_more_prompts_than_a_step_may_refill(tmp_path: Path) -> None:
    def script(task: Task, number: int) -> Script:
        assert number < 9000, "prompts are used up for as long as the outage lasts"
        outage = 50.0 < now() < 115.0  # from before the first sync to before the second
        return Script(seconds=0.1, fails_at=0 if outage else None, score=float(number % 2))

    made = config(steps=12, max_refill_rounds=2, max_staleness=2)
    made.environment.max_failed_fraction = 1.0
    world = World(made, tmp_path, lambda prompt_id: 1.0, environments=SimEnvironments(script))
    world.trainer.seconds = 15.0  # a step takes a minute
    play(world)
    unplayable = [line["rollout/unplayable_groups"] for line in world.recorder.lines]
    assert max(unplayable) >= 12
    assert max(unplayable) <= 12 + made.groups_in_flight
    assert world.recorder.lines[-1]["rollout/groups"] == 4.0
    assert_each_group_ended_once(world)


def test_metrics_are_means_over_the_episodes_of_the_step(tmp_path: Path) -> None:
    made = config(PlacementKind.colocate, steps=1)
    turns = np.random.default_rng(0).integers(1, 4, 64)
    environments = SimEnvironments(
        lambda task, number: Script(turns=int(turns[number]), seconds=2.0, score=float(number % 2))
    )
    world = World(made, tmp_path, lambda prompt_id: 1.0, environments=environments)
    play(world)
    (line,) = world.recorder.lines
    played = [len(session.asked) for session in training(world)]
    assert line["environment/turns_mean"] == np.mean(played)
    assert line["environment/turns_max"] == max(played)
    assert line["environment/observation_tokens"] == np.mean([2 * (count - 1) for count in played])
    assert line["completion/length_mean"] == np.mean([4 * count for count in played])
    assert line["tokens/completion"] == 4 * sum(played)
    assert line["environment/tool_calls"] == 1.0
    assert line["environment/sequences_mean"] == 1.0

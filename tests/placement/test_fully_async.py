"""The controllers of partial rollouts around simulated engines and trainers, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import RunConfig
from app.config.checkpoint import CheckpointConfig
from app.config.placement import PlacementKind, Stream
from app.errors import RunError, TrainerError
from app.placement import controller as placement_controller
from app.placement.fully_async import FullyAsync
from app.rollout.engine import pool
from app.types import Group, InFlight, Trajectory
from tests.simulation import BOTH, World, config, long_tailed, now, play, virtual, without_threads

ASYNC, COLOCATE = PlacementKind.fully_async, PlacementKind.colocate
MODES = [
    (ASYNC, 1, InFlight.drain),
    (ASYNC, 1, InFlight.retract),
    (ASYNC, 2, InFlight.in_place),
    (COLOCATE, 1, InFlight.retract),
]


def dispatched(world: World) -> Counter[str]:
    """How often each training prompt was sent to an engine."""
    calls: Counter[str] = sum((engine.calls for engine in world.engines), Counter())
    return Counter({prompt_id: n for prompt_id, n in calls.items() if not prompt_id.startswith("eval/")})


def total(world: World, name: str) -> float:
    return sum(line[f"rollout/{name}_groups"] for line in world.recorder.lines)


def assert_ledger(world: World) -> None:
    """Every dispatched group ended exactly once, and no prompt was lost or trained on twice."""
    sent, trained = dispatched(world), world.trainer.ids
    assert len(trained) == len(set(trained))
    useless = {p for p in sent if world.config.algorithm.dynamic_sampling and not spread(world, p)}
    returned = set(world.cursor.state()["returned"])
    assert set(sent) == set(trained) | useless | returned
    assert not set(trained) & (useless | returned)
    ends = len(trained) + total(world, "filtered") + total(world, "dropped") + total(world, "aborted")
    assert sent.total() == ends
    position = world.cursor.state()
    drawn = position["epoch"] * len(world.cursor) + position["position"]
    assert len(sent) == drawn


def spread(world: World, prompt_id: str) -> bool:
    return len({world.right(prompt_id, member) for member in range(world.config.algorithm.group_size)}) > 1


def assert_bound(world: World) -> None:
    for version, groups in world.trainer.trained:
        assert all(version - group.oldest_version <= world.config.placement.max_staleness for group in groups)
    assert max(line["staleness/max"] for line in world.recorder.lines) <= world.config.placement.max_staleness


@st.composite
def schedules(draw: st.DrawFn) -> tuple[RunConfig, int, float, float]:
    kind = draw(st.sampled_from(PlacementKind))
    colocate = kind is PlacementKind.colocate
    staleness = draw(st.integers(1 if colocate else 0, 3))
    made = config(
        kind,
        steps=draw(st.integers(1, 7)),
        prompts_per_step=draw(st.integers(1, 5)),
        max_staleness=staleness,
        in_flight=None if colocate or not staleness else draw(st.sampled_from(InFlight)),
        max_inflight_groups=draw(st.integers(1, 12)),
        stream=draw(st.sampled_from([Stream.auto, Stream.off])),
        dynamic_sampling=draw(st.booleans()),
        every=draw(st.integers(0, 2)),
    )
    return made, draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 0.3, 3.0])), draw(st.floats(0, 0.7))


@settings(max_examples=20, deadline=None)
@given(schedules())
def test_any_run_ends_within_its_bound_and_every_group_ends_once(
    tmp_path_factory: pytest.TempPathFactory, schedule: tuple[RunConfig, int, float, float]
) -> None:
    made, seed, train_seconds, useless = schedule
    rolls = long_tailed(seed, sigma=1.2)
    right: Callable[[str, int], bool] = lambda p, m: m % 2 == 0 and long_tailed(seed + 1, sigma=1)(p) > useless  # noqa: E731
    world = World(made, tmp_path_factory.getbasetemp(), rolls, right)
    world.trainer.seconds = train_seconds
    play(world)
    assert len(world.trainer.ids) == made.steps * made.algorithm.prompts_per_step
    assert [version for _, version in world.sync.pushed] == list(range(made.steps + 1))
    assert_bound(world)
    assert_ledger(world)


@pytest.mark.parametrize(("kind", "staleness", "mode"), MODES)
def test_stale_groups_are_aborted_or_dropped_and_their_prompts_sampled_again(
    tmp_path: Path, kind: PlacementKind, staleness: int, mode: InFlight
) -> None:
    tails = {f"sim/{row}": 9.0 for row in range(0, 50, 5)}
    made = config(kind, steps=12, max_staleness=staleness, in_flight=mode, max_inflight_groups=12)
    world = World(made, tmp_path, lambda prompt_id: tails.get(prompt_id.split("@")[0], 0.5))
    play(world)
    assert_bound(world)
    assert_ledger(world)
    aborted = [prompt_id for engine in world.engines for prompt_id in engine.aborted]
    assert len(aborted) == total(world, "aborted")
    if mode is InFlight.drain:  # whoever is in flight finishes before it could become too stale
        assert not aborted
    else:
        assert aborted
        assert any(span.version > 0 for _, groups in world.trainer.trained for g in groups for span in spans(g))
        assert any(len(spans(group)) > 1 for _, groups in world.trainer.trained for group in groups)


def spans(group: object) -> Sequence:
    return group.trajectories[0].completion.spans  # type: ignore[attr-defined]


def test_staleness_is_used_and_saves_time(tmp_path: Path) -> None:
    seconds = {}
    for staleness, mode in ((0, InFlight.drain), (1, InFlight.drain), (1, InFlight.in_place)):
        world = World(config(steps=20, max_staleness=staleness, in_flight=mode), tmp_path, long_tailed(3))
        seconds[staleness, mode] = play(world)
    on_policy, drained, continued = seconds.values()
    assert continued < drained < on_policy


def test_a_step_of_colocate_ends_without_its_tail_which_continues_under_the_next_policy(tmp_path: Path) -> None:
    """Of 4 groups a step, one in five takes 6 s; the others take 0.5 s."""
    tails = {f"sim/{row}": 6.0 for row in range(0, 50, 5)}
    seconds, sampled = [], []
    for staleness in (0, 20):
        made = config(COLOCATE, steps=12, max_staleness=staleness, max_inflight_groups=16)
        world = World(made, tmp_path, lambda prompt_id: tails.get(prompt_id.split("@")[0], 0.5), tokens=100)
        world.trainer.seconds = 0.5

        async def train(groups: Sequence, world: World = world, add: Callable = world.trainer.add_groups) -> None:
            before = [engine.busy for engine in world.engines]
            await add(groups)
            sampled.append(before != [engine.busy for engine in world.engines])

        world.trainer.add_groups = train  # type: ignore[method-assign]
        seconds.append(play(world))
        assert_ledger(world)

    assert seconds[1] < seconds[0] / 2
    assert not any(sampled)  # while the trainer has the devices
    long = [group for _, groups in world.trainer.trained for group in groups if group.prompt.id.split("@")[0] in tails]
    assert long
    for group in long:
        versions = [span.version for span in spans(group)]
        assert versions == list(range(versions[0], versions[-1] + 1))  # a part of it under each
    assert max(len(spans(group)) for group in long) > 2

    again = sum(3 + span.start for group in long for each in group.trajectories for span in each.completion.spans[1:])
    assert sum(line["rollout/recomputed_tokens"] for line in world.recorder.lines) == again > 0


def test_groups_are_trained_on_as_they_arrive_only_when_streamed(tmp_path: Path) -> None:
    def feeds(stream: Stream) -> list[int]:
        world = World(config(steps=1, stream=stream), tmp_path, long_tailed(1))
        sizes: list[int] = []
        feed = world.trainer.add_groups

        async def count(groups: Sequence) -> None:
            sizes.append(len(groups))
            await feed(groups)

        world.trainer.add_groups = count  # type: ignore[method-assign]
        play(world)
        return sizes

    assert len(feeds(Stream.auto)) > 1
    assert feeds(Stream.off) == [4]


def test_not_streamed_groups_are_trained_on_in_the_order_of_their_dispatch(tmp_path: Path) -> None:
    world = World(config(steps=1, stream=Stream.off, updates_per_step=2), tmp_path, long_tailed(1))
    play(world)
    order = [prompt_id for engine in world.engines for _, _, prompt_id in engine.begun]
    arrival = sorted(order, key=world.seconds)
    drawn = [prompt.id for prompt in World(world.config, tmp_path).cursor.take(4)]
    assert world.trainer.ids == drawn
    assert arrival != drawn


def versions(groups: Iterable[Group]) -> set[int]:
    """Those that sampled a token of these groups."""
    return {span.version for group in groups for each in group.trajectories for span in each.completion.spans}


def test_a_version_is_evaluated_beside_the_next_step_whose_update_waits(tmp_path: Path) -> None:
    made = config(steps=6, max_staleness=1, in_flight=InFlight.in_place, every=2)
    world = World(made, tmp_path, long_tailed(2), eval_rows=30)
    added: list[float] = []
    add = world.trainer.add_groups

    async def record(groups: Sequence) -> None:
        await add(groups)
        added.append(now())

    world.trainer.add_groups = record  # type: ignore[method-assign]
    play(world)
    pushed = {version: at for at, version in world.sync.pushed}
    begun = sorted((at, prompt_id) for engine in world.engines for at, _, prompt_id in engine.begun)
    assert [step for _, step in world.recorder.evaluations] == [2, 4, 6]
    for ended, step in world.recorder.evaluations:
        during = [(at, prompt_id) for at, prompt_id in begun if pushed[step] <= at < ended]
        evals = [at for at, prompt_id in during if prompt_id.startswith("eval/")]
        assert len(evals) == 30
        assert evals[0] == pytest.approx(pushed[step])
        assert versions(world.recorder.evaluated[step]) == {step}
        if step < made.steps:
            assert len(during) > len(evals)
            assert any(pushed[step] < at < ended for at in added)
            updated = world.trainer.finished_at[step]
            assert ended + world.trainer.finish <= updated + 1e-6 < pushed[step + 1]


def test_the_wait_for_an_evaluation_and_the_checkpoint_after_it_are_no_time_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is beside an evaluation of 10 s, after which the best state is captured for 5 s."""
    without_threads(monkeypatch)
    for module in (placement_controller, pool):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now))
    made = config(steps=4, max_staleness=1, in_flight=InFlight.in_place, every=2)
    made.checkpoint = CheckpointConfig(keep=1)
    training = iter([1.0] * 12 + [30.0] * 4)  # the groups of step 4 keep the engines busy during step 3
    world = World(made, tmp_path, lambda prompt_id: 10.0 if prompt_id.startswith("eval/") else next(training))

    async def capture() -> int:
        await asyncio.sleep(5.0)
        return 0

    world.trainer.capture = capture  # type: ignore[method-assign]
    play(world)
    line = world.recorder.lines[2]
    assert line["time/train"] == pytest.approx(4 * 0.1 + 0.2)
    assert line["time/evaluation_wait"] == pytest.approx(10.0 - line["time/wait"] - 4 * 0.1)
    assert line["time/step"] == pytest.approx(line["time/wait"] + 4 * 0.1 + 0.2 + 0.1)
    assert line["idle/rollout"] == pytest.approx(0.0)


def test_an_engine_that_dies_during_an_evaluation_gets_the_version_that_is_evaluated(tmp_path: Path) -> None:
    """Its requests are sampled again 5 s later, when the next step has all of its groups."""

    def make() -> World:
        made = config(steps=4, max_staleness=2, in_flight=InFlight.in_place, every=2)
        return World(made, tmp_path, lambda prompt_id: 10.0 if prompt_id.startswith("eval/") else 1.0, engine_count=1)

    play(undisturbed := make())
    begun = next(at for at, version in undisturbed.sync.pushed if version == 2)
    play(world := make(), (begun + 6.0, 0))
    assert world.engines[1].calls["eval/0"] == 2
    assert [step for _, step in world.recorder.evaluations] == [2, 4]
    assert [versions(world.recorder.evaluated[step]) for step in (2, 4)] == [{2}, {4}]


class Broken:
    async def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        raise RunError("the reward failed on purpose")


def reward_fails(world: World) -> None:
    world.scorer = Broken()  # type: ignore[assignment]


def trainer_fails(world: World) -> None:
    world.trainer.fail = {
        "add_groups": TrainerError("rank 0 failed on purpose"),
        "abort_step": TrainerError("rank 0 is gone"),
    }


@pytest.mark.parametrize("breaks", [reward_fails, trainer_fails])
def test_a_failure_anywhere_ends_the_run_with_its_own_sentence(tmp_path: Path, breaks: Callable[[World], None]) -> None:
    world = World(config(max_staleness=2), tmp_path)
    breaks(world)
    with pytest.raises(RunError, match="on purpose"):
        play(world)


def test_the_idle_shares_of_a_step_are_those_of_its_times(tmp_path: Path) -> None:
    world = World(config(max_staleness=1), tmp_path)
    play(world)
    for line in world.recorder.lines:
        waited = line["time/wait"] + line["time/sync"]
        assert line["idle/trainer"] == pytest.approx(waited / line["time/step"])
        assert line["idle/rollout"] == pytest.approx(1 - line["time/generate"] / line["time/step"])


@virtual
async def test_dynamic_sampling_ends_after_its_refill_rounds_and_trains_on_what_is_there(tmp_path: Path) -> None:
    made = config(steps=2, dynamic_sampling=True, max_refill_rounds=3)
    useful = {prompt.id for prompt in World(made, tmp_path).cursor.take(3)}
    world = World(made, tmp_path, right=lambda prompt_id, member: prompt_id in useful and member == 0)

    controller = FullyAsync(world.context())
    await controller.run()
    assert [len(groups) for _, groups in world.trainer.trained] == [3]  # the second step had nothing: no update
    assert [line["rollout/groups"] for line in world.recorder.lines] == [3, 0]
    assert [version for _, version in world.sync.pushed] == [0, 1, 2]
    assert all(16 <= line["rollout/filtered_groups"] < 16 + 8 for line in world.recorder.lines)
    assert controller.producer.staleness.accepted == 8
    assert controller.producer.staleness.in_flight == 0


def test_what_was_filtered_while_groups_wait_does_not_cut_a_step_short(tmp_path: Path) -> None:
    made = config(steps=5, prompts_per_step=2, max_staleness=3, dynamic_sampling=True, max_refill_rounds=1)
    world = World(made, tmp_path, long_tailed(6), lambda prompt_id, member: member == 0 and hash_of(prompt_id) % 3 > 0)
    world.trainer.seconds = 5.0  # much is filtered while the trainer is busy
    play(world)
    assert [line["rollout/groups"] for line in world.recorder.lines] == [2] * 5
    assert_ledger(world)


def hash_of(prompt_id: str) -> int:
    return int(prompt_id.split("/")[1].split("@")[0])


@BOTH
def test_several_steps_with_nothing_to_learn_end_the_run_with_the_reason(tmp_path: Path, kind: PlacementKind) -> None:
    world = World(config(kind, dynamic_sampling=True, max_refill_rounds=2), tmp_path, right=lambda p, m: True)
    with pytest.raises(RunError, match="3 steps in a row"):
        play(world)
    assert world.trainer.trained == []

"""Engines that die, a trainer that fails, in virtual time: the run ends as an undisturbed one does, or says why not."""

import asyncio
import contextlib
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config.placement import PlacementKind
from app.errors import EngineError, EngineLost
from app.mode.train import CONTROLLERS
from app.placement.controller import PlacementController
from app.placement.emergency_checkpoint import save_last_step
from app.placement.fully_async import FullyAsync
from app.rollout.requests import sampling_of
from app.types import GroupRequest, InFlight, TrainerMemory
from tests.simulation import BOTH, SimEngine, World, config, long_tailed, now, play, virtual, without_threads


def assert_sound(world: World) -> None:
    """Every step trained on as many groups as it wants, each prompt once, and no engine served what was not pushed."""
    trained = world.trainer.ids
    assert len(world.trainer.trained) == world.config.steps
    assert Counter(trained).most_common(1)[0][1] == 1
    assert len(trained) == world.config.steps * world.config.algorithm.prompts_per_step
    assert all(version >= 0 for engine in world.engines for _, version, _ in engine.begun)
    for version, groups in world.trainer.trained:
        assert all(version - group.oldest_version <= world.config.placement.max_staleness for group in groups)
    assert [each[1] for each in world.recorder.ledger] == [
        [group.prompt.id for group in groups] for _, groups in world.trainer.trained
    ]


@BOTH
def test_an_engine_that_dies_is_replaced_and_its_prompts_are_sent_again(kind: PlacementKind, tmp_path: Path) -> None:
    world = World(config(kind), tmp_path)
    play(world, (0.5, 0))
    assert_sound(world)
    assert len(world.engines) == 3
    assert world.engines[2].begun
    assert [line["recovery/engine_restarts"] for line in world.recorder.lines][-1] == 1
    assert sum(line["rollout/failed_groups"] for line in world.recorder.lines) >= 1
    (warning,) = world.recorder.warnings
    assert "on purpose" in warning


def test_an_engine_of_colocate_that_was_lost_before_the_first_push_is_replaced_by_it(tmp_path: Path) -> None:
    """As in the turn of a new trainer: its parameters are on the device, and nobody may take them away."""
    world = World(config(PlacementKind.colocate, steps=3), tmp_path, engine_count=1)

    def lose(controller: PlacementController) -> None:
        world.engines[0].die()
        controller.context.pool.mark_lost(world.engines[0], EngineLost("engine 0 died on purpose"))

    play(world, at_start=lose, limit=1000.0)
    assert_sound(world)
    assert len(world.engines) == 2


@virtual
async def test_a_replacement_is_not_taken_for_the_engine_that_a_failed_sync_finds_dead(tmp_path: Path) -> None:
    """Engine 0 dies and is replaced while the sync waits for engine 1 to drain."""
    world = World(config(in_flight=InFlight.drain), tmp_path, lambda prompt_id: 30.0)
    context = world.context()
    dead, busy = world.engines
    async with asyncio.timeout(1000), context.supervisor.monitor():
        request = GroupRequest("sim/0", np.arange(3, dtype=np.int32), 2, sampling_of(context.config.rollout), 0)
        draining = asyncio.create_task(busy.generate(request))
        await asyncio.sleep(0.1)
        syncing = asyncio.create_task(context.weight_sync.sync(1))
        await asyncio.sleep(1)
        dead.die()
        context.pool.mark_lost(dead, EngineLost("engine 0 died on purpose"))
        await syncing
        await draining
        await asyncio.sleep(100)
        assert not context.pool.lost
        assert [engine.version for engine in (world.engines[2], busy)] == [1, 1]
        assert len(world.engines) == 3


@virtual
async def test_a_lost_engine_is_ended_before_the_trainer_takes_the_devices(tmp_path: Path) -> None:
    """A server that does not answer keeps its memory until it is ended."""
    world = World(config(PlacementKind.colocate), tmp_path)
    context = world.context()
    await context.time_sharing.give_to_engines(lambda: context.weight_sync.sync(0))
    hung = world.engines[1]

    async def silent(in_flight: InFlight) -> None:
        raise EngineLost("no answer")

    async def onload(region: TrainerMemory) -> None:
        assert hung.ended

    hung.pause = silent  # type: ignore[method-assign]
    world.trainer.onload = onload  # type: ignore[method-assign]
    await context.time_sharing.give_to_trainer()
    assert [engine.ended for engine in world.engines] == [False, True]


@pytest.mark.parametrize("cut_at", [3.0, 5.1])
@virtual
async def test_an_engine_whose_replacement_was_cut_short_is_replaced_in_the_trainers_next_life(
    cut_at: float, tmp_path: Path
) -> None:
    """The trainer was lost while the new engine started (5 s), or while the policy was pushed to it."""
    world = World(config(), tmp_path, engine_count=1, push_seconds=0.2)

    context = world.context()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(cut_at), context.supervisor.monitor():
            context.pool.mark_lost(world.engines[0], EngineLost("engine died on purpose"))
            await context.pool.wait_for_any()
    assert context.pool.lost
    async with asyncio.timeout(1000), context.supervisor.monitor():
        await FullyAsync(context).run()
    assert_sound(world)


@BOTH
@virtual
async def test_an_interrupted_commit_keeps_the_filtered_prompts_of_its_step(
    kind: PlacementKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they are missing in the ledger and sampled again after the resume."""
    without_threads(monkeypatch)

    def uniform(prompt_id: str) -> bool:
        return int(prompt_id.removeprefix("sim/").partition("@")[0]) % 3 == 0

    made = config(kind, steps=6, dynamic_sampling=True)
    made.checkpoint.keep = 1
    world = World(made, tmp_path, right=lambda prompt_id, member: uniform(prompt_id) or member % 2 == 0)
    context = world.context()
    controller = CONTROLLERS[kind](context)
    sample, measuring = context.memory.sample, asyncio.Event()

    async def slow() -> dict[str, float]:
        if len(world.recorder.lines) == 1:
            measuring.set()
            await asyncio.sleep(5)
        return await sample()

    context.memory.sample = slow  # type: ignore[method-assign]
    async with context.supervisor.monitor():
        running = asyncio.create_task(controller.run())
        await measuring.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await save_last_step(controller)

    (_, _, filtered) = world.recorder.ledger[1]
    assert filtered
    assert all(map(uniform, filtered))
    assert world.recorder.lines[1]["rollout/filtered_groups"] == len(filtered)
    assert not set(filtered) & set(world.cursor.state()["returned"])


@given(
    kind=st.sampled_from(PlacementKind),
    deaths=st.lists(st.tuples(st.floats(0.1, 40.0), st.integers(0, 5)), max_size=4),
    engines=st.integers(1, 3),
    staleness=st.integers(0, 2),
    in_flight=st.sampled_from(list(InFlight)),
    seed=st.integers(0, 10),
)
@settings(deadline=None, max_examples=60)
def test_whenever_engines_die_nothing_is_lost_or_trained_on_twice(
    tmp_path_factory: pytest.TempPathFactory,
    kind: PlacementKind,
    deaths: list[tuple[float, int]],
    engines: int,
    staleness: int,
    in_flight: InFlight,
    seed: int,
) -> None:
    chosen = staleness > 0 and kind is PlacementKind.fully_async
    folder = tmp_path_factory.mktemp("deaths")
    made = config(kind, max_staleness=staleness, in_flight=in_flight if chosen else None)
    made.recovery.max_engine_failures = 20  # of one prompt
    world = World(made, folder, long_tailed(seed), engine_count=engines, push_seconds=0.5)
    play(world, *deaths, limit=3000.0)
    assert_sound(world)


@pytest.mark.parametrize("call", ["pause", "release", "reload"])
def test_a_restarted_engine_of_colocate_that_dies_around_its_sync_is_restarted_again(call: str, tmp_path: Path) -> None:
    world = World(config(PlacementKind.colocate, steps=3), tmp_path, lambda prompt_id: 1.0)
    made = world.replace
    replacements: list[SimEngine] = []

    def replace(place: int) -> SimEngine:
        engine = made(place)
        replacements.append(engine)
        if len(replacements) == 1:

            async def dies(*_: object) -> None:
                engine.die()
                raise EngineLost("engine 1 died on purpose")

            setattr(engine, call, dies)
        return engine

    world.replace = replace  # type: ignore[method-assign]
    play(world, (0.5, 1))
    assert_sound(world)
    assert len(replacements) == 2


@BOTH
def test_a_prompt_that_is_lost_too_often_ends_the_run(kind: PlacementKind, tmp_path: Path) -> None:
    world = World(config(kind), tmp_path, lambda _: 100.0, engine_count=1)
    with pytest.raises(EngineError, match=r"^prompt sim/\d+@0 .*6 times"):
        play(world, *((10.0 + 30 * turn, turn) for turn in range(7)))


@pytest.mark.parametrize(
    ("kind", "staleness"), [(PlacementKind.colocate, 0), (PlacementKind.colocate, 2), (PlacementKind.fully_async, 2)]
)
def test_a_checkpoint_holds_the_prompts_that_are_not_done_with(
    kind: PlacementKind, staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    made = config(kind, max_staleness=staleness, steps=5)
    made.checkpoint.every = 2
    made.checkpoint.keep = 2
    world = World(made, tmp_path, long_tailed(2))
    play(world)
    for step in (4, 5):  # the newest two
        state = json.loads((tmp_path / "checkpoints" / f"step_{step}" / "state.json").read_text())
        assert (state["step"], state["version"]) == (step, step)
        cursor = state["extra"]["cursor"]
        settled = {prompt for at, trained, _ in world.recorder.ledger if at <= step for prompt in trained}
        assert len(settled) == step * 4
        assert not settled & set(cursor["returned"])
        assert len(settled) + len(cursor["returned"]) == cursor["position"] + cursor["epoch"] * len(world.cursor)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == ["step_4", "step_5"]


@pytest.mark.parametrize("deaf", ["abort", "stats"])
@virtual
async def test_an_engine_that_does_not_abort_is_lost_after_a_deadline_and_holds_up_no_other(
    deaf: str, tmp_path: Path
) -> None:
    world = World(config(), tmp_path, lambda prompt_id: 100.0)

    async def silent(prompt_ids: object = None) -> None:
        await asyncio.Event().wait()

    context = world.context()
    setattr(world.engines[0], deaf, silent)
    sampling = sampling_of(context.config.rollout)
    groups = [
        asyncio.create_task(context.rollouter.group(p, size=2, sampling=sampling, version=lambda: 0))
        for p in world.cursor.take(4)
    ]
    await asyncio.sleep(1)
    await context.supervisor.abort_in_flight()
    assert list(context.pool.lost) == [0]
    assert re.search("engine 0: .*within 10 s", str(context.pool.lost[0]))
    assert len(world.engines[1].aborted) == 2
    for group in groups:
        group.cancel()
    assert now() == pytest.approx(1 + 10, abs=0.2)


@virtual
async def test_engines_that_do_not_answer_after_a_failed_sync_are_found_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of them may wait in one broadcast."""

    async def silent(engine: SimEngine) -> None:
        await asyncio.sleep(10)
        raise EngineLost("no answer")

    monkeypatch.setattr(SimEngine, "check", silent)

    context = World(config(PlacementKind.fully_async), tmp_path, engine_count=4).context()
    began = now()
    await context.supervisor.diagnose(dict(enumerate(context.pool.engines)))
    assert (now() - began, len(context.pool.lost)) == (10.0, 4)

"""A run without progress ends with what it waits for, in every placement; whatever makes progress goes on."""

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.errors import EngineError, RunError
from app.placement.watchdog import MARGIN_S, POLL_INTERVAL_S, STATS_TIMEOUT_S, limit_seconds, watchdog
from app.rollout.engine.remote import CALL_TIMEOUT_S
from app.types import EngineStats, SyncReport
from tests.simulation import BOTH, SimEngine, World, config, now, play, virtual

ASYNC = PlacementKind.fully_async
LIMIT = CALL_TIMEOUT_S + MARGIN_S  # of `quick`


def quick(kind: PlacementKind, **changes: object) -> RunConfig:
    """A run of which every call with a setting for it has a deadline of 5 s."""
    made = config(kind, timeout_s=5.0, stall_timeout_s=5.0, start_timeout_s=5.0, **changes)
    made.weight_sync.timeout_s = 5.0
    made.reward.timeout_s = 0.1
    return made


def hang(*prompts: str) -> Callable[[str], float]:
    """These prompts are lost in an engine that lives on; the others take a second."""
    return lambda prompt_id: math.inf if prompt_id.startswith(prompts) else 1.0


@BOTH
def test_a_lost_completion_ends_the_run_and_is_named_with_its_engine(kind: PlacementKind, tmp_path: Path) -> None:
    world = World(quick(kind), tmp_path, hang("sim/7@"), rows=8)
    phase = "generate" if kind is PlacementKind.colocate else "wait"
    with pytest.raises(RunError) as failure:
        play(world)
    sentence = (
        rf"no progress for 960 s: step \d, phase {phase}: 1 groups in flight \(sim/7@0 on engine [01]\), "
        "2 of 2 engines ready"
    )
    assert re.match(sentence, str(failure.value)), failure.value
    assert "completions = await ready.generate(" in (tmp_path / "logs" / "stacks.log").read_text()


def evaluation_hangs(world: World) -> None:
    for engine in world.engines:
        engine.seconds = hang("eval/1")


def training_hangs(world: World) -> None:
    world.trainer.hang = "add_groups"


def finish_hangs(world: World) -> None:
    world.trainer.hang = "finish_step"


def sync_hangs(world: World) -> None:
    sync = world.sync.sync

    async def hangs(version: int) -> SyncReport:
        if version == 2:
            await asyncio.Event().wait()
        return await sync(version)

    world.sync.sync = hangs  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "hangs", "phase"),
    [
        (PlacementKind.colocate, evaluation_hangs, "step 1, phase evaluate.*eval/1"),
        (ASYNC, evaluation_hangs, "step 3, phase evaluation_wait.*eval/1.*evaluating step 2"),
        (PlacementKind.colocate, training_hangs, "step 1, phase train"),
        (ASYNC, finish_hangs, "step 1, phase finish"),
        (PlacementKind.colocate, sync_hangs, "step 2, phase sync"),
        (ASYNC, sync_hangs, "step 2, phase sync"),
    ],
)
def test_whatever_hangs_ends_the_run_with_its_step_and_phase(
    kind: PlacementKind, hangs: Callable[[World], None], phase: str, tmp_path: Path
) -> None:
    world = World(quick(kind, before_train=kind is not ASYNC and hangs is evaluation_hangs, every=2), tmp_path)
    with pytest.raises(RunError, match=phase):
        play(world, at_start=lambda _: hangs(world))


def test_a_completion_that_keeps_sampling_is_progress_however_long_it_takes(tmp_path: Path) -> None:
    seconds: Callable[[str], float] = lambda prompt_id: 1e4 if prompt_id.startswith("sim/7@") else 1.0  # noqa: E731
    world = World(quick(ASYNC, steps=2), tmp_path, seconds, rows=8)
    assert play(world) > 1e4
    assert len(world.trainer.ids) == 8


@BOTH
def test_calls_of_the_trainer_that_return_are_progress_when_nothing_is_sampled(
    kind: PlacementKind, tmp_path: Path
) -> None:
    """Each call stays within the limit, a step does not."""
    world = World(quick(kind, steps=2), tmp_path)
    world.trainer.seconds = 0.9 * LIMIT / 4
    world.trainer.finish = 0.9 * LIMIT
    assert play(world) > 2 * 1.5 * LIMIT


@BOTH
def test_attempts_to_restart_an_engine_are_progress_until_they_are_too_many(
    kind: PlacementKind, tmp_path: Path
) -> None:
    world = World(quick(kind), tmp_path, engine_count=1, start_seconds=0.9 * LIMIT)
    made = world.replace

    def dead(place: int) -> SimEngine:
        engine = made(place)

        async def start(timeout_s: float) -> dict[str, Any]:
            await asyncio.sleep(engine.start_seconds)
            raise EngineError("no memory on purpose")

        engine.start = start  # type: ignore[method-assign]
        return engine

    world.replace = dead  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"^engine 0 .*6 attempts"):
        play(world, (0.5, 0))


@virtual
async def test_an_engine_that_does_not_say_what_it_sampled_neither_stops_the_watchdog_nor_counts_as_progress(
    tmp_path: Path,
) -> None:
    async def silent() -> EngineStats:
        await asyncio.Event().wait()
        raise AssertionError

    async def refuses() -> EngineStats:
        raise EngineError("no stats on purpose")

    world = World(quick(ASYNC), tmp_path)
    context = world.context()
    world.engines[0].stats = silent  # type: ignore[method-assign]
    world.engines[1].stats = refuses  # type: ignore[method-assign]
    with pytest.raises(RunError, match="0 groups in flight, 2 of 2"):
        async with watchdog(context.rollouter, context.pool, world.config, tmp_path):
            await asyncio.Event().wait()
    assert now() <= LIMIT + 3 * (POLL_INTERVAL_S + STATS_TIMEOUT_S)


def test_the_limit_is_above_the_deadline_of_every_single_call() -> None:
    made = RunConfig()
    assert limit_seconds(made) == made.trainer.timeout_s + MARGIN_S == 1860
    made.rollout.start_timeout_s = 3000.0
    assert limit_seconds(made) == 3000 + 30 + 10 + 32 + 60  # start, reply, end of the one before, pause
    made.weight_sync.timeout_s = 4000.0
    assert limit_seconds(made) == 4060
    made.rollout.stall_timeout_s = 5000.0
    assert limit_seconds(made) == 5060
    made.teacher.timeout_s = 2000.0
    assert limit_seconds(made) == 5060  # there is no teacher
    made.teacher.urls = ["http://a:1"]
    assert limit_seconds(made) == 6 * (2000 + 16) + 60  # a request and its five retries
    made.teacher.urls = None
    made.environment.timeout_s = 2000.0
    assert limit_seconds(made) == 5060  # there is no environment
    made.environment._target_ = "my_envs.Guess"  # a step, its abort, and a worker that starts
    assert limit_seconds(made) == (2000 + 10) + (2 * 2000 + 15) + 120 + 60
    made.environment.timeout_s = 60.0
    made.algorithm.group_size = 16
    made.reward.timeout_s = 600.0  # of one trajectory; a group is scored together, then one by one
    assert limit_seconds(made) == 16 * (2 * 600 + 60) + 60  # a worker starts within 60 s

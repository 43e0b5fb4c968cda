"""The pool sends a group to the engine with the fewest outstanding completions."""

import asyncio
import math
import random

import pytest

from app.errors import EngineError, EngineLost
from app.protocols import RolloutEngine
from app.rollout.engine.pool import EnginePool
from app.types import Completion, InFlight
from tests.rollout import support
from tests.simulation import SimEngine


def endless() -> SimEngine:
    """An engine that samples until it dies."""
    return SimEngine(lambda _: math.inf, lambda _, __: True)


async def sent(pool: EnginePool, name: str, group_size: int) -> asyncio.Task[list[Completion]]:
    async def generate() -> list[Completion]:
        async with pool.least_busy(group_size) as (_, engine):
            return await engine.generate(support.request(name, group_size=group_size))

    task = asyncio.create_task(generate())
    await asyncio.sleep(0)
    return task


async def test_an_engine_that_failed_a_group_has_no_work_left_from_it() -> None:
    one, two = endless(), endless()
    pool = EnginePool([one, two])
    failing = await sent(pool, "a", 8)
    one.die(EngineError("engine 0 died"))
    with pytest.raises(EngineError, match="engine 0 died"):
        await failing
    one.fail = None
    cancelled = await sent(pool, "b", 8)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await sent(pool, "c", 1)
    await sent(pool, "d", 1)
    assert (list(one.calls), list(two.calls)) == (["a", "b", "c"], ["d"])


async def test_a_lost_engine_gets_no_group_until_it_is_replaced() -> None:
    one, two, replacement = endless(), endless(), endless()
    pool = EnginePool([one, two])
    failing = await sent(pool, "a", 1)
    one.die(EngineLost("engine 0 was killed"))
    with pytest.raises(EngineLost, match="engine 0 was killed"):
        await failing
    assert pool.engine_lost.is_set()
    assert pool.alive == [two]
    for name in ("b", "c"):
        await sent(pool, name, 4)
    assert (list(one.calls), list(two.calls)) == (["a"], ["b", "c"])
    pool.mark_lost(two, EngineLost("engine 1 was killed"))
    waiting = await sent(pool, "d", 1)
    assert await pool.each(RolloutEngine.pause, InFlight.drain) == {}
    assert not waiting.done()
    pool.replace(0, replacement)
    pool.mark_ready(0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert list(replacement.calls) == ["d"]


async def test_the_choice_is_that_of_a_plain_loop_over_all_engines() -> None:
    chance = random.Random(0)
    engines = [endless() for _ in range(20)]
    pool = EnginePool(engines)
    load = dict.fromkeys(range(20), 0)
    choices = set()
    for number in range(300):
        ready = [index for index in load if index not in pool.lost]
        wanted = min(ready, key=lambda index: (load[index], index))
        with pool.sticky_engine(chance.randint(1, 4)) as sticky_engine:
            async with sticky_engine.engine() as (name, _):
                assert name == f"engine {wanted}"

        completions = chance.randint(1, 9)
        await sent(pool, str(number), completions)
        assert str(number) in engines[wanted].calls
        load[wanted] += completions
        choices.add(wanted)
        if number % 20 == 5 and len(ready) > 3:
            pool.mark_lost(pool.engines[chance.choice(ready)], EngineLost("killed"))
    assert len(choices) == 20
    assert len(pool.lost) == 15

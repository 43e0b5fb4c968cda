"""What a run shows while its workers start. In virtual time."""

import asyncio
from pathlib import Path

import pytest

from app.errors import EngineError
from app.mode.session import RolloutWorkers
from app.types import EngineStart
from tests.simulation import SimEngine, World, config, run_virtual


class StartingEngine(SimEngine):
    """Takes `seconds_each` for every phase of its start."""

    seconds_each = 0.0

    async def start_phase(self) -> EngineStart:
        phases = list(EngineStart)
        return phases[min(int(asyncio.get_running_loop().time() / self.seconds_each), len(phases) - 1)]


def starting(folder: Path, *seconds_each: float) -> tuple[RolloutWorkers, list[str]]:
    """Engines that are ready after four phases of so many seconds, and what is shown."""
    shown: list[str] = []
    context = World(config(), folder, engine_count=len(seconds_each)).context()
    engines = []
    for seconds in seconds_each:
        engine = StartingEngine(lambda prompt_id: 1.0, lambda prompt_id, member: True)
        engine.seconds_each = seconds
        engine.start_seconds = 4 * seconds
        engines.append(engine)
    context.pool.engines[:] = engines
    return RolloutWorkers(
        context.config, None, None, context.pool, context.supervisor, context.rollouter, shown.append
    ), shown


def test_a_start_shows_what_the_slowest_engine_does(tmp_path: Path) -> None:
    async def story() -> list[str]:
        workers, shown = starting(tmp_path, 0.5, 10.0)
        await workers.start_engines()
        return shown

    assert run_virtual(story()) == [
        "2 engines: importing SGLang",
        "2 engines: loading the weights",
        "2 engines: allocating the KV cache",
        "2 engines: warming up",
        "2 engines ready",
    ]


def test_an_engine_that_does_not_start_shows_nothing_as_ready(tmp_path: Path) -> None:
    async def story() -> list[str]:
        workers, shown = starting(tmp_path, 1.0)

        async def fail(timeout_s: float) -> None:
            await asyncio.sleep(2.5)
            raise EngineError("engine 0 exited with code 1")

        workers.pool.engines[0].start = fail
        with pytest.raises(EngineError, match="exited with code 1"):
            await workers.start_engines()
        return shown

    assert run_virtual(story()) == [
        "1 engine: importing SGLang",
        "1 engine: loading the weights",
        "1 engine: allocating the KV cache",
    ]

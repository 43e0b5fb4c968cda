"""Builds what outlives a trainer (Ray, engines, reward workers), runs, and ends everything, however the run ends."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from app.cluster.process_reaper import reaper
from app.config import Mode, RunConfig
from app.device import Device, device_of
from app.errors import Interrupted
from app.mode.preflight import Prepared, prepare
from app.recovery.engine_supervisor import Recovery
from app.recovery.resume import only_driver
from app.rollout.pool import EnginePool
from app.rollout.rollouter import Sampler
from app.tracking.recorder import RunRecorder
from app.utils.tasks import first_failure

T = TypeVar("T")


def run(config: RunConfig, folder: Path) -> float:
    """The whole run; returns the last evaluation's accuracy."""
    device = device_of(config.device.kind)
    with only_driver(folder), RunRecorder(config, folder) as recorder:
        return asyncio.run(until_signal(_run(config, device, folder, recorder)))


async def until_signal(work: Coroutine[Any, Any, T]) -> T:
    """The work's result; SIGINT and SIGTERM end it with `Interrupted`, after everything was ended."""
    task = asyncio.ensure_future(work)
    asked: list[str] = []

    def stop(number: signal.Signals) -> None:
        asked.append(number.name)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        raise Interrupted(f"interrupted by {asked[0]}" if asked else "interrupted") from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _run(config: RunConfig, device: Device, folder: Path, recorder: RunRecorder) -> float:
    from app.eval.evaluate import evaluate_alone
    from app.mode.train import live

    async with rollout_side(config, device, folder, recorder) as side:
        if config.mode is not Mode.eval:
            return await live(config, device, folder, recorder, side)
        await together(*side.starts(config.rollout.start_timeout_s))
        async with side.recovery.watching():
            return await evaluate_alone(side.sampler, side.prepared.prompts.evals, config, recorder)


@dataclass(frozen=True, slots=True)
class RolloutSide:
    """What generates and scores: enough for an evaluation. It stays when the trainer has to be made anew."""

    prepared: Prepared
    reservation: Any
    pool: EnginePool
    recovery: Recovery
    sampler: Sampler

    def starts(self, timeout_s: float) -> list[Coroutine[Any, Any, Any]]:
        """Of the engines: to be awaited together with whatever else starts."""
        return [engine.start(timeout_s) for engine in self.pool.engines]  # type: ignore[attr-defined]


@asynccontextmanager
async def rollout_side(
    config: RunConfig, device: Device, folder: Path, recorder: RunRecorder
) -> AsyncIterator[RolloutSide]:
    """Ray, engines and reward workers. The engines are left to be started with the trainer."""
    from app.cluster import placement_group as cluster
    from app.cluster.actors import make_engine
    from app.reward.scorer import Scorer

    async with contextlib.AsyncExitStack() as stack:
        prepared = prepare(config, recorder.doing)
        scorer = Scorer(
            config.reward,
            step_trajectories=config.algorithm.trajectories_per_step,
            log=folder / "logs" / "reward.log",
        )
        stack.callback(scorer.close)
        stack.enter_context(reaper())
        recorder.doing("starting Ray")
        stack.callback(_shutdown_ray)
        cluster.connect(config, device)
        reservation = cluster.reserve(config, device)
        trained = "" if config.mode is Mode.eval else f" and {config.placement.trainer_ranks} trainer rank(s)"
        recorder.doing(f"starting {config.engines} engine(s){trained}")
        make = partial(make_engine, config, device, prepared.model_path, folder, reservation)
        pool = EnginePool([make(place) for place in range(config.engines)])
        stack.push_async_callback(_stop_engines, pool)
        sampler = Sampler(pool, scorer, prepared.tokenizer, recorder.timeline, config.recovery)
        recovery = Recovery(config, pool, make, recorder.warn)
        yield RolloutSide(prepared, reservation, pool, recovery, sampler)


async def together(*work: Any) -> None:
    """All of it; the first failure is raised and the rest is cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


async def _stop_engines(pool: EnginePool) -> None:
    await asyncio.gather(*(engine.end() for engine in pool.engines))  # type: ignore[attr-defined]


def _shutdown_ray() -> None:
    import ray

    ray.shutdown()

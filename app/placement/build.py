"""Builds the parts of a run, introduces them to each other, and ends them all, however the run ends."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import Mode, RunConfig
from app.device import Device, device_of
from app.errors import Interrupted, RunError
from app.placement.fully_async import first_failure
from app.placement.parts import Parts
from app.placement.prepare import Prepared, prepare
from app.placement.reaper import reaper
from app.placement.sampler import Sampler
from app.placement.schema import PlacementKind
from app.rollout.pool import EnginePool
from app.tracking.recorder import RunRecorder

log = logging.getLogger(__name__)
STOP_SECONDS = 10.0


def run(config: RunConfig, folder: Path) -> float:
    """The whole run; returns the last evaluation's accuracy."""
    device = device_of(config.device.kind)
    with RunRecorder(config, folder) as recorder:
        return asyncio.run(_until_signal(_run(config, device, folder, recorder)))


async def _until_signal(work: Any) -> float:
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
    from app.placement.colocate import Colocate
    from app.placement.evaluate import evaluate_alone
    from app.placement.fully_async import FullyAsync
    from app.placement.train import Conductor

    stories: dict[PlacementKind, type[Conductor]] = {
        PlacementKind.colocate: Colocate,
        PlacementKind.fully_async: FullyAsync,
    }
    if config.mode is Mode.eval:
        async with rollout_side(config, device, folder, recorder) as side:
            return await evaluate_alone(side.sampler, side.prepared.prompts.evals, config, recorder)
    async with build(config, device, folder, recorder) as parts:
        return await stories[config.placement.kind](parts).run()


@dataclass(frozen=True, slots=True)
class RolloutSide:
    """What generates and scores: enough for an evaluation."""

    prepared: Prepared
    reservation: Any
    engines: list[Any]
    pool: EnginePool
    sampler: Sampler


@asynccontextmanager
async def build(config: RunConfig, device: Device, folder: Path, recorder: RunRecorder) -> AsyncIterator[Parts]:
    """All parts, started; all of them ended when the block is left."""
    from app.offload.trainer import Offload
    from app.placement.actors import make_trainer
    from app.weight_sync.make import make_sync

    async with contextlib.AsyncExitStack() as stack:
        side = await stack.enter_async_context(rollout_side(config, device, folder, recorder, wait=False))
        trainer = make_trainer(config, device, side.prepared.model_path, folder, side.reservation)
        stack.callback(_kill_ranks, trainer)
        await _together(trainer.setup(), *_starts(config, side.engines))
        await trainer.attach("offload", Offload)
        sync = make_sync(config, device, trainer, side.engines, folder)
        stack.push_async_callback(sync.close)
        await sync.prepare()
        yield Parts(
            config=config,
            trainer=trainer,
            pool=side.pool,
            sync=sync,
            sampler=side.sampler,
            cursor=side.prepared.prompts.train,
            evals=side.prepared.prompts.evals,
            recorder=recorder,
        )


@asynccontextmanager
async def rollout_side(
    config: RunConfig, device: Device, folder: Path, recorder: RunRecorder, *, wait: bool = True
) -> AsyncIterator[RolloutSide]:
    """Ray, engines and reward workers. Without `wait` the engines are left to be started with the trainer."""
    from app.placement import cluster
    from app.placement.actors import make_engines
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
        trained = "" if wait else f" and {config.placement.trainer_ranks} trainer rank(s)"
        recorder.doing(f"starting {config.engines} engine(s){trained}")
        engines = make_engines(config, device, prepared.model_path, folder, reservation)
        stack.push_async_callback(_stop_engines, engines)
        if wait:
            await _together(*_starts(config, engines))
        pool = EnginePool(engines)
        sampler = Sampler(pool, scorer, prepared.tokenizer, recorder.timeline)
        yield RolloutSide(prepared, reservation, engines, pool, sampler)


def _starts(config: RunConfig, engines: list[Any]) -> list[Any]:
    return [engine.start(config.rollout.start_timeout_s) for engine in engines]


async def _together(*work: Any) -> None:
    """All of it; the first failure is raised and the rest is cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


async def _stop_engines(engines: list[Any]) -> None:
    """Politely first; what does not answer dies with its host."""
    stopping = [asyncio.wait_for(engine.stop(), STOP_SECONDS) for engine in engines]
    for engine, outcome in zip(engines, await asyncio.gather(*stopping, return_exceptions=True), strict=True):
        if isinstance(outcome, (RunError, TimeoutError)):
            log.warning("%s did not stop by itself: %s", engine.name, outcome)


def _kill_ranks(trainer: Any) -> None:
    import ray

    for rank in trainer.ranks:
        ray.kill(rank)


def _shutdown_ray() -> None:
    import ray

    ray.shutdown()

"""Builds what outlives a trainer (Ray, engines, reward workers) and the trainer itself, and ends both."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from app.cluster.process_reaper import process_reaper
from app.config import Mode, RunConfig
from app.config.placement import PlacementKind
from app.device import Device
from app.mode.preflight import RunInputs, prepare
from app.placement.time_sharing import TimeSharing
from app.recovery.engine_supervisor import EngineSupervisor
from app.rollout.pool import EnginePool
from app.rollout.rollouter import Rollouter
from app.tracking.recorder import RunFolderRecorder
from app.types import TrainerMemory
from app.utils.tasks import gather_or_raise
from app.weight_sync.synchronizer import BucketedWeightSynchronizer


@dataclass(frozen=True, slots=True)
class RolloutWorkers:
    """What generates and scores: enough for an evaluation. It stays when the trainer has to be made anew."""

    prepared: RunInputs
    reservation: Any
    pool: EnginePool
    recovery: EngineSupervisor
    rollouter: Rollouter

    def starts(self, timeout_s: float) -> list[Coroutine[Any, Any, Any]]:
        """Of the engines: to be awaited together with whatever else starts."""
        return [engine.start(timeout_s) for engine in self.pool.engines]


@asynccontextmanager
async def start_rollout_workers(
    config: RunConfig, device: Device, folder: Path, recorder: RunFolderRecorder
) -> AsyncIterator[RolloutWorkers]:
    """Ray, engines and reward workers. The engines are left to be started with the trainer."""
    from app.cluster.actors import make_engine
    from app.cluster.connect import connect
    from app.cluster.placement_group import reserve
    from app.reward.scorer import Scorer

    async with contextlib.AsyncExitStack() as stack:
        prepared = prepare(config, recorder.status)
        scorer = Scorer(
            config.reward,
            step_trajectories=config.algorithm.trajectories_per_step,
            log=folder / "logs" / "reward.log",
        )
        stack.callback(scorer.close)
        stack.enter_context(process_reaper())
        recorder.status("starting Ray")
        stack.callback(_shutdown_ray)
        connect(config, device)
        reservation = reserve(config, device)
        trained = "" if config.mode is Mode.eval else f" and {config.placement.trainer_ranks} trainer rank(s)"
        recorder.status(f"starting {config.engines} engine(s){trained}")
        make = partial(make_engine, config, device, prepared.model_path, folder, reservation)
        pool = EnginePool([make(place) for place in range(config.engines)])
        stack.push_async_callback(_stop_engines, pool)
        rollouter = Rollouter(pool, scorer, prepared.tokenizer, recorder.timeline, config.recovery)
        recovery = EngineSupervisor(config, pool, make, recorder.warn)
        yield RolloutWorkers(prepared, reservation, pool, recovery, rollouter)


async def _stop_engines(pool: EnginePool) -> None:
    await asyncio.gather(*(engine.end() for engine in pool.engines))


def _shutdown_ray() -> None:
    import ray

    ray.shutdown()


@asynccontextmanager
async def start_trainer_workers(
    config: RunConfig, device: Device, folder: Path, side: RolloutWorkers, *, first: bool
) -> AsyncIterator[tuple[Any, BucketedWeightSynchronizer]]:
    """The ranks and their sync; both ended when the block is left. The engines are started with the first ones."""
    from app.cluster.actors import make_trainer
    from app.offload.trainer import Offload
    from app.weight_sync.factory import make_sync

    async with contextlib.AsyncExitStack() as stack:
        trainer = make_trainer(config, device, side.prepared.model_path, folder, side.reservation)
        stack.callback(_kill_ranks, trainer)
        starts = side.starts(config.rollout.start_timeout_s) if first else []
        if config.placement.kind is PlacementKind.colocate and device.shares_memory:
            turns = TimeSharing(config.offload, trainer, side.pool)
            if not first:
                await turns.offload_engines()
            await trainer.setup()
            await trainer.attach_offload(partial(Offload, moves=device.shares_memory))
            if first:  # an engine takes what it finds free
                await turns.offload_trainer(TrainerMemory)
                await gather_or_raise(*starts)
                await turns.offload_engines()
                await turns.onload_trainer(TrainerMemory)
        else:
            await gather_or_raise(trainer.setup(), *starts)
            await trainer.attach_offload(partial(Offload, moves=device.shares_memory))
        sync = make_sync(config, device, trainer, side.pool.engines, folder)
        stack.push_async_callback(sync.close)
        await sync.prepare()
        yield trainer, sync


def _kill_ranks(trainer: Any) -> None:
    import ray

    for rank in trainer.ranks:
        ray.kill(rank)

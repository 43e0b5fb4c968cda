"""Alternates shared devices between trainer and engines.

    give_to_engines   offload gradients, optimizer │ reload engine weights │ sync │ offload parameters │ reload KV cache
    give_to_trainer   pause and release the engines │ onload the trainer

Parameters are on the device during the sync, since offloaded shards cannot be read. The KV cache is reloaded only after
they are offloaded: the device cannot hold both. The sync resumes the engines, which go on once their caches are back
(`EngineHost.resume`). With adapters (`model.lora`) the engines keep their weights, which no sync sends. A side that
`offload` excludes stays on the device. On a CPU the same calls are made in the same order, but no region moves: a
paused engine drops its padded copy of the KV cache (`app/cpu_engine/batched_attention.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.config.offload import OffloadConfig
from app.protocols import RolloutEngine, Trainer
from app.recovery.engine_supervisor import EngineSupervisor
from app.rollout.engine.pool import EnginePool
from app.types import EngineMemory, InFlight, SyncReport, TrainerMemory

CACHES = (EngineMemory.graphs, EngineMemory.kv_cache)  # not needed while weights are synced
OPTIMIZER_STATE = (TrainerMemory.gradients, TrainerMemory.optimizer)  # not read by a sync


@dataclass(eq=False)
class TimeSharing:
    """Hands the devices over: `give_to_engines` and `give_to_trainer` alternate.

    The supervisor restarts engines only during the engines' turn.
    """

    offload: OffloadConfig
    trainer: Trainer
    pool: EnginePool
    supervisor: EngineSupervisor
    adapters: bool  # whether the engines serve adapters: then no sync brings their weights back
    in_flight: InFlight = InFlight.drain  # or retract

    @property
    def weights(self) -> tuple[EngineMemory, ...]:
        return () if self.adapters else (EngineMemory.weights,)

    async def give_to_engines(self, sync: Callable[[], Awaitable[SyncReport]]) -> SyncReport:
        """Hand the devices to the engines. `sync` copies the current policy into them."""
        await self.offload_trainer(OPTIMIZER_STATE)
        # Two calls: the weights before the sync, the caches when the trainer's parameters are off the device.
        if self.offload.engine:
            await self.pool.each(RolloutEngine.reload, self.weights)

        report = await sync()

        await self.offload_trainer([TrainerMemory.parameters])
        if self.offload.engine:
            await self.pool.each(RolloutEngine.reload, CACHES)
        self.supervisor.resume_restarts()
        return report

    async def give_to_trainer(self) -> None:
        """Pause the engines and hand the devices to the trainer."""
        await self.supervisor.pause_restarts()
        await self.offload_engines()
        await self.onload_trainer(TrainerMemory)

    async def offload_engines(self) -> None:
        """Pause the engines and release their device memory; end those that are lost, which cannot release it."""
        if self.offload.engine or self.in_flight is not InFlight.drain:
            await self.pool.each(RolloutEngine.pause, self.in_flight)
        if not self.offload.engine:
            return

        await self.pool.each(RolloutEngine.release, (*CACHES, *self.weights))
        await self.supervisor.end_lost()

    async def offload_trainer(self, regions: Iterable[TrainerMemory]) -> None:
        if self.offload.trainer:
            for region in regions:
                await self.trainer.offload(region)

    async def onload_trainer(self, regions: Iterable[TrainerMemory]) -> None:
        if self.offload.trainer:
            for region in regions:
                await self.trainer.onload(region)

    @asynccontextmanager
    async def params_onloaded(self, engines: Iterable[RolloutEngine]) -> AsyncIterator[None]:
        """Onload the trainer's parameters during the engines' turn, to sync them into these restarted engines."""
        engines = list(engines)
        if self.offload.engine:
            await asyncio.gather(*(engine.pause(InFlight.drain) for engine in engines))
            await asyncio.gather(*(engine.release(CACHES) for engine in engines))
        await self.onload_trainer([TrainerMemory.parameters])

        yield

        await self.offload_trainer([TrainerMemory.parameters])
        if self.offload.engine:
            await asyncio.gather(*(engine.reload(CACHES) for engine in engines))

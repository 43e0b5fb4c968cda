"""Who has the memory of the devices that trainer and engines share, and how it changes hands.

Does nothing for a side that `offload` leaves where it is. Which calls move memory at all is the device's business: on a
CPU the same calls are made, in the same order.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from app.config.offload import OffloadConfig
from app.protocols import RolloutEngine, Trainer
from app.rollout.pool import EnginePool
from app.types import EngineMemory, InFlight, TrainerMemory

CACHES = (EngineMemory.graphs, EngineMemory.kv_cache)  # what an engine can do without while weights are pushed to it
OPTIMIZER_STATE = (TrainerMemory.gradients, TrainerMemory.optimizer)  # what a push does not read


class TimeSharing:
    def __init__(self, offload: OffloadConfig, trainer: Trainer, pool: EnginePool):
        self.offload, self.trainer, self.pool = offload, trainer, pool

    async def offload_engines(self) -> None:
        """Everything of the engines, as soon as they are idle."""
        if self.offload.engine:
            await self.pool.each(RolloutEngine.pause, InFlight.drain)
            for part in (*CACHES, EngineMemory.weights):
                await self.pool.each(RolloutEngine.release, part)

    async def weights_return(self) -> None:
        """The engines' weights, whose content is yet to be pushed."""
        if self.offload.engine:
            await self.pool.each(RolloutEngine.reload, EngineMemory.weights)

    async def reload_kv_cache(self) -> None:
        if self.offload.engine:
            for part in reversed(CACHES):
                await self.pool.each(RolloutEngine.reload, part)

    async def offload_trainer(self, parts: Iterable[TrainerMemory]) -> None:
        if self.offload.trainer:
            for part in parts:
                await self.trainer.offload(part)

    async def onload_trainer(self, parts: Iterable[TrainerMemory]) -> None:
        if self.offload.trainer:
            for part in parts:
                await self.trainer.onload(part)

    @asynccontextmanager
    async def params_onloaded(self, engines: Iterable[RolloutEngine]) -> AsyncIterator[None]:
        """The trainer's parameters on the device while these engines, which are not generating yet, have it."""
        engines = list(engines)
        if self.offload.engine:
            await asyncio.gather(*(engine.pause(InFlight.drain) for engine in engines))
            for part in CACHES:
                await asyncio.gather(*(engine.release(part) for engine in engines))
        await self.onload_trainer([TrainerMemory.parameters])
        yield
        await self.offload_trainer([TrainerMemory.parameters])
        if self.offload.engine:
            for part in reversed(CACHES):
                await asyncio.gather(*(engine.reload(part) for engine in engines))

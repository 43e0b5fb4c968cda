"""Retries failed weight syncs, and determines whether an engine or the trainer failed.

Invariants:
    - The parameters are not updated while they are synced (`updating`).
    - If an engine failed, the sync is retried without it, or with its replacement. If the trainer failed, its
      `TrainerError` is raised.
    - After more than `recovery.max_engine_failures` failures in a row the last failure is raised.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from app.errors import EngineError, SyncError
from app.protocols import RolloutEngine, Trainer, WeightSynchronizer
from app.recovery.engine_supervisor import Engines, EngineSupervisor, backoff, summary
from app.types import SyncReport


@dataclass(eq=False)
class RetryingWeightSync:
    """`WeightSynchronizer.sync` (app/protocols.py) over engines that may be lost.

    `params_on_device` is the context in which the parameters are on the device during the engines' turn.
    """

    synchronizer: WeightSynchronizer
    trainer: Trainer
    supervisor: EngineSupervisor
    version: int
    params_on_device: Callable[[Iterable[RolloutEngine]], AbstractAsyncContextManager[None]] | None = None
    _failures: int = 0  # in a row, of syncs into restarted engines
    _parameters: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the parameters are read or updated

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """Block syncs during the update that produces policy `version`."""
        async with self._parameters:
            yield
            self.version = version

    async def sync(self, version: int) -> SyncReport:
        """Sync into every engine, with retries. Raises `EngineError`, `SyncError` or `TrainerError`."""
        report: SyncReport | None = None
        attempt = 0
        while report is None:
            attempt += 1
            engines = await self._targets()
            self.version = version
            report = await self._attempt(engines, attempt)

        self._failures = 0
        self.supervisor.mark_ready(engines)
        return report

    async def sync_restarted(self, engines: Engines) -> Engines:
        """Sync the current policy into restarted engines; returns those that have it."""
        on_device = self.params_on_device or (lambda engines: nullcontext())
        try:
            async with on_device(engines.values()):
                report = await self._attempt(engines, self._failures + 1)
        except EngineError as error:  # while its regions were released or reloaded, or the last attempt
            await self.supervisor.diagnose(engines)
            if self._failures + 1 > self.supervisor.limit:
                raise
            self.supervisor.warn(f"{summary(error)} (repeating sync {self.version}, attempt {self._failures + 2})")
            await asyncio.sleep(backoff(self._failures + 1))
            report = None

        # The supervisor marks them ready only now: inside the block their KV cache is still released.
        self._failures = 0 if report is not None else self._failures + 1
        return engines if report is not None else {}

    async def _targets(self) -> Engines:
        """Return the engines to sync. While automatic restarts are paused, restart the lost engines first."""
        pool = self.supervisor.pool
        if self.supervisor.restarts_paused:
            await self.supervisor.restart_lost()
            absent = pool.lost.keys() - self.supervisor.unsynced
        else:
            await pool.wait_for_any()
            absent = set(pool.lost)
        return {index: engine for index, engine in enumerate(pool.engines) if index not in absent}

    async def _attempt(self, engines: Engines, attempt: int) -> SyncReport | None:
        """Make one attempt; returns None if it failed and may be retried."""
        try:
            async with self._parameters:
                self.synchronizer.set_engines(engines)
                return await self.synchronizer.sync(self.version)
        except (EngineError, SyncError) as error:
            await self.supervisor.diagnose(engines)
            await self.trainer.version()  # raises if the trainer caused the failure
            if attempt > self.supervisor.limit:
                raise
            self.supervisor.warn(f"{summary(error)} (repeating sync {self.version}, attempt {attempt + 1})")
            await asyncio.sleep(backoff(attempt))
            return None

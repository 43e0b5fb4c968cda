"""Replaces engines that died or stalled.

    lost → kill its processes → start a new one at its index → sync the current policy into it → ready

Invariants:
    - A restarted engine generates only after a complete sync of the current policy. The other engines keep generating.
    - Where engines and trainer share devices, engines are restarted only during the engines' turn
      (`pause_restarts`, `resume_restarts`).
    - More than `recovery.max_engine_failures` failed starts in a row end the run with the last failure.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from app.config import RunConfig
from app.errors import EngineError, EngineLost, one_line
from app.protocols import RolloutEngine
from app.rollout.engine.pool import EnginePool
from app.utils.tasks import gather_or_raise, task_group

BACKOFF_S = 1.0  # before the second attempt; doubled for each further one
MAX_BACKOFF_S = 32.0
ABORT_TIMEOUT_S = 10.0  # deadline of an engine to abort all of its requests
POLL_INTERVAL_S = 0.1
Engines = Mapping[int, RolloutEngine]  # by index


class EngineSupervisor:
    """Restarts the lost engines of a pool.

    Lifecycle: `monitor` around all generation; `attach` for each new trainer, whose policy is synced into restarted
    engines. Without a trainer (mode=eval) no sync is needed: engines load the right weights when they start.
    """

    def __init__(
        self, config: RunConfig, pool: EnginePool, make: Callable[[int], RolloutEngine], warn: Callable[[str], None]
    ) -> None:
        self.config = config
        self.pool = pool
        self.make = make  # creates the engine of an index, not started
        self.warn = warn
        self.restarts = 0  # engines replaced so far
        self.unsynced: set[int] = set()  # indices of restarted engines without the current policy
        self.limit = config.recovery.max_engine_failures  # of failures in a row
        self._sync: Callable[[Engines], Awaitable[Engines]] | None = None
        self._replacing = asyncio.Lock()  # held while the monitor replaces engines
        self._restarts_allowed = asyncio.Event()
        self._restarts_allowed.set()

    def attach(self, sync: Callable[[Engines], Awaitable[Engines]]) -> None:
        """Set how restarted engines get the current policy: one attempt, which returns those that now have it."""
        self._sync = sync

    @asynccontextmanager
    async def monitor(self) -> AsyncIterator[None]:
        """Restart lost engines while the block runs. Raises `EngineError` when restarts fail too often.

        When the block begins, engines may already be lost, or restarted but unsynced.
        """
        if self.pool.lost:
            self.pool.engine_lost.set()
        async with task_group() as tasks:
            monitor = tasks.create_task(self._restart_forever(), name="engine supervisor")
            yield
            monitor.cancel()

    async def abort_in_flight(self) -> None:
        """Abort all requests and wait until they have ended. An engine that takes too long is marked lost."""
        await asyncio.gather(*(self._abort_requests(engine) for engine in self.pool.alive))

    # --- turns, where engines and trainer share devices

    @property
    def restarts_paused(self) -> bool:
        return not self._restarts_allowed.is_set()

    async def pause_restarts(self) -> None:
        """Pause automatic restarts; wait for one in progress."""
        async with self._replacing:
            self._restarts_allowed.clear()

    def resume_restarts(self) -> None:
        self._restarts_allowed.set()

    # --- restarts

    async def restart_lost(self) -> None:
        """Restart all lost engines. The pool still counts them as lost until the policy is synced into them."""
        self.pool.engine_lost.clear()
        await gather_or_raise(*(self._restart(index) for index in self.pool.lost.keys() - self.unsynced))

    async def end_lost(self) -> None:
        """End the lost engines, which may hold device memory that the trainer needs. `restart_lost` replaces them."""
        self.unsynced.clear()
        await asyncio.gather(*(self.pool.engines[index].end() for index in self.pool.lost))

    def mark_ready(self, engines: Engines) -> None:
        """Let restarted engines that have the policy generate again. No effect on those replaced meanwhile."""
        for index, engine in engines.items():
            if index in self.unsynced and self.pool.engines[index] is engine:
                self.unsynced.discard(index)
                self.pool.mark_ready(index)

    async def diagnose(self, engines: Engines) -> None:
        """Check these engines, all at the same time, and mark the lost ones, unless they were replaced meanwhile."""
        errors = await asyncio.gather(*(engine.check() for engine in engines.values()), return_exceptions=True)
        for (index, engine), error in zip(engines.items(), errors, strict=True):
            if isinstance(error, EngineError):
                if self.pool.engines[index] is engine:
                    self.unsynced.discard(index)
                    self.pool.mark_lost(engine, as_lost(error))
            elif error is not None:
                raise error

    async def _abort_requests(self, engine: RolloutEngine) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await engine.abort()
                while True:
                    if not (await engine.stats()).groups:
                        return
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            late = f"{engine.name}: requests in flight were not aborted within {ABORT_TIMEOUT_S:.0f} s"
            self.pool.mark_lost(engine, EngineLost(late))
        except EngineError as error:
            self.pool.mark_lost(engine, as_lost(error))

    async def _restart_forever(self) -> None:
        while True:
            await self.pool.engine_lost.wait()
            await self._restarts_allowed.wait()
            async with self._replacing:
                if not self.restarts_paused:
                    await self.restart_lost()
                    await self._sync_restarted()

    async def _sync_restarted(self) -> None:
        """Sync the current policy into the restarted engines, and into no others, until all have it."""
        while self.unsynced:
            engines = {index: self.pool.engines[index] for index in self.unsynced}
            if self._sync is not None:
                engines = dict(await self._sync(engines))
            self.mark_ready(engines)

    async def _restart(self, index: int) -> None:
        error: EngineError = self.pool.lost[index]
        for attempt in itertools.count(1):
            self.warn(f"{summary(error)} (restarting, attempt {attempt})")
            await self.pool.engines[index].end()
            if attempt > 1:
                await asyncio.sleep(backoff(attempt - 1))

            engine = self.make(index)
            self.pool.replace(index, engine)
            try:
                await engine.start(self.config.rollout.start_timeout_s)
            except EngineError as failure:
                if attempt > self.limit:
                    raise EngineError(
                        f"{engine.name} was lost and could not be restarted in {attempt} attempts "
                        f"(recovery.max_engine_failures={self.limit}); the last one: {failure}"
                    ) from failure
                error = failure
            else:
                self.restarts += 1
                self.unsynced.add(index)
                return


def as_lost(error: EngineError) -> EngineLost:
    """Return the error as the cause of an engine's loss."""
    return error if isinstance(error, EngineLost) else EngineLost(str(error))


def backoff(failures: int) -> float:
    """Return the seconds to wait after this many failures in a row.

    >>> [backoff(failures) for failures in (1, 2, 3, 50)]
    [1.0, 2.0, 4.0, 32.0]
    """
    return min(BACKOFF_S * 2.0 ** min(failures - 1, 10), MAX_BACKOFF_S)


def summary(error: BaseException) -> str:
    """Return the first line of an error, without the lead-in to the log lines below it."""
    return one_line(error).removesuffix("; its last lines:")

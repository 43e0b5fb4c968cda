"""Keeps a run's engines alive: replaces one that died or stalled, brings it the current policy, repeats a failed push.

    lost → end what is left of it → start another in its place → push to it → it is asked again

Always holds: an engine is asked for completions only after a whole push of the current policy to it; the other engines
go on meanwhile; parameters are not updated while they are pushed; where engines and trainer share devices, an engine is
started only while the devices are the engines'. After `recovery.max_engine_failures` failures in a row the run ends with
what failed last.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol

from app.config import RunConfig
from app.errors import EngineError, EngineLost, RunError, SyncError, TrainerError, TrainerLost
from app.protocols import RolloutEngine, Trainer
from app.rollout.pool import EnginePool
from app.types import SyncReport
from app.utils.tasks import root_cause

BACKOFF_SECONDS = 1.0  # before the second attempt; doubled for each further one
FORGET_SECONDS = 10.0  # for an engine to end what nobody waits for any more
POLL_SECONDS = 0.1
Engines = Mapping[int, RolloutEngine]  # by place


class ChangeableSync(Protocol):
    """A weight sync whose engines may change."""

    def set_engines(self, engines: Engines) -> None: ...

    async def sync(self, version: int) -> SyncReport: ...


class EngineSupervisor:
    """Implements `WeightSync` (app/protocols.py) over engines that may be lost.

    `make` creates an engine for a place (with `start` and `end`, as `RemoteEngine` has them); `warn` tells people.
    """

    def __init__(
        self, config: RunConfig, pool: EnginePool, make: Callable[[int], Any], warn: Callable[[str], None]
    ) -> None:
        self.config, self.pool, self.make, self.warn = config, pool, make, warn
        self.restarts = 0  # engines replaced so far
        self.version = 0  # of the trainer's parameters
        self.parameters_at_hand: Callable[[Engines], AbstractAsyncContextManager[None]] = lambda _: nullcontext()
        self._limit = config.recovery.max_engine_failures
        self._trainer: Trainer | None = None
        self._sync: ChangeableSync | None = None
        self._fresh: set[int] = set()  # places whose new engine runs and was not pushed to yet
        self._parameters = asyncio.Lock()  # held while they are read or changed
        self._replacing = asyncio.Lock()  # held by the background task while it replaces engines
        self._turn = asyncio.Event()  # the engines may use their devices
        self._turn.set()

    def attach(self, trainer: Trainer, sync: ChangeableSync, version: int) -> None:
        """Where policies come from. Without any (mode=eval) the one that an engine starts with is the right one."""
        self._trainer, self._sync, self.version = trainer, sync, version

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Replace engines while the block runs; ends it with one sentence when that is not possible.

        The block before may have ended with engines lost, or with new ones that nothing was pushed to.
        """
        if self.pool.lost:
            self.pool.engine_lost.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(self._replace_forever(), name="recovery")
                yield
                watcher.cancel()
        except BaseExceptionGroup as failures:
            raise root_cause(failures) from None

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """Around the update that makes the parameters those of `version`: nobody reads them meanwhile."""
        async with self._parameters:
            yield
            self.version = version

    async def forget(self) -> None:
        """Let the engines end what a lost trainer's steps had asked for; one that does not is replaced."""
        deadline = time.monotonic() + FORGET_SECONDS
        await self.pool.each(RolloutEngine.abort)
        for engine in self.pool.alive:
            try:
                while (await engine.stats()).groups:
                    if time.monotonic() > deadline:
                        raise EngineLost(f"requests in flight were not aborted within {FORGET_SECONDS:.0f} s")
                    await asyncio.sleep(POLL_SECONDS)
            except EngineLost as why:
                self.pool.mark_lost(engine, why)

    # --- whose turn it is, where engines and trainer share devices

    async def trainers_turn(self) -> None:
        """From now on no engine is started by itself; waits for one that is being started."""
        async with self._replacing:
            self._turn.clear()

    def engines_turn(self) -> None:
        self._turn.set()

    # --- pushing

    async def sync(self, version: int) -> SyncReport:
        """Carry the policy into every engine, again if need be. Raises `SyncError`, or `TrainerLost`."""
        for attempt in itertools.count(1):
            if not self._turn.is_set():  # nobody else starts them now
                await self._start_lost()
            else:
                await self.pool.wait_for_any()  # if none lives, one is on its way
            self.version = version
            away = self.pool.lost.keys() - (set() if self._turn.is_set() else self._fresh)
            targets = {place: engine for place, engine in enumerate(self.pool.engines) if place not in away}
            report = await self._try(targets, attempt)
            if report is not None:
                self._welcome(targets)
                return report
        raise AssertionError("unreachable")

    async def _try(self, targets: Engines, attempt: int) -> SyncReport | None:
        """A push to these. None: it failed, and may be repeated."""
        assert self._sync is not None
        try:
            async with self._parameters:
                self._sync.set_engines(targets)
                report = await self._sync.sync(self.version)
        except (EngineError, SyncError) as error:
            await self._find_the_lost(error, targets)
            if attempt > self._limit:
                raise
            self.warn(f"{first_line(error)} (push {self.version} is repeated, attempt {attempt + 1})")
            await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
            return None
        return report

    async def _find_the_lost(self, error: RunError, targets: Engines) -> None:
        """Look who is to blame for a failed push. Raises `TrainerLost` if it is the trainer."""
        assert self._trainer is not None
        for place, engine in targets.items():
            try:
                await engine.check()
            except EngineLost as why:
                self._fresh.discard(place)
                self.pool.mark_lost(engine, why)
        try:
            await self._trainer.version()
        except TrainerError as gone:
            raise TrainerLost(str(gone)) from error

    def _welcome(self, targets: Engines) -> None:
        for place in self._fresh & targets.keys():
            self._fresh.discard(place)
            self.pool.mark_ready(place)

    # --- replacing

    async def _replace_forever(self) -> None:
        while True:
            await self.pool.engine_lost.wait()
            await self._turn.wait()
            async with self._replacing:
                if self._turn.is_set():
                    await self._start_lost()
                    await self._admit()

    async def _admit(self) -> None:
        """Push the current policy to engines that were started, and to no others."""
        for attempt in itertools.count(1):
            fresh = {place: self.pool.engines[place] for place in self._fresh}
            if not fresh:
                return
            if self._sync is None:
                self._welcome(fresh)
                return
            async with self.parameters_at_hand(fresh):
                report = await self._try(fresh, attempt)
            if report is not None:  # nobody may ask an engine whose cache is not back
                self._welcome(fresh)

    async def _start_lost(self) -> None:
        self.pool.engine_lost.clear()
        async with asyncio.TaskGroup() as tasks:
            for place in self.pool.lost.keys() - self._fresh:
                tasks.create_task(self._start(place), name=f"start of engine {place}")

    async def _start(self, place: int) -> None:
        why: EngineError = self.pool.lost[place]
        for attempt in itertools.count(1):
            self.warn(f"{first_line(why)} (started again, attempt {attempt})")
            await self.pool.engines[place].end()
            if attempt > 1:
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 2))
            engine = self.pool.engines[place] = self.make(place)
            try:
                await engine.start(self.config.rollout.start_timeout_s)
            except EngineError as error:
                if attempt > self._limit:
                    raise EngineError(
                        f"engine {place} was lost and could not be started again in {attempt} attempts "
                        f"(recovery.max_engine_failures={self._limit}); the last one: {error}"
                    ) from error
                why = error
            else:
                self.restarts += 1
                self._fresh.add(place)
                return


def first_line(error: BaseException) -> str:
    """Without what announces the lines that follow."""
    return str(error).splitlines()[0].removesuffix("; its last lines:")

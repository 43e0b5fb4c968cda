"""Balances groups over engines, by outstanding completions, and records which engines are lost.

A group of episodes has a sticky engine: that of its first turn serves all turns of its members, which share prefixes.

Invariants:
    - A lost engine gets no request until `mark_ready`. While all engines are lost, groups wait.
    - If the owner of the pool cannot replace engines, it must end the run, so that no group waits forever.
    - Calls have the deadlines of `RolloutEngine`. The pool adds none; `progress` shows a watchdog that calls return.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from app.errors import EngineLost, one_line
from app.protocols import RolloutEngine

P = ParamSpec("P")
T = TypeVar("T")
LOST_LOAD = np.iinfo(np.int64).max


class EnginePool:
    """The engines of a run.

    Lifecycle of an engine:
        1. Ready: `least_busy`, sticky engines and `each` use it.
        2. Lost: by an `EngineLost` in a call, or by `mark_lost`. `engine_lost` is set.
        3. Replaced: the owner puts a new engine at the same index with `replace`, then calls `mark_ready`.

    Attributes:
        progress: Calls that returned, and engines replaced, so far.
    """

    def __init__(self, engines: Sequence[RolloutEngine]):
        self.engines = list(engines)
        self.lost: dict[int, EngineLost] = {}  # engine index → cause
        self.engine_lost = asyncio.Event()  # set by `mark_lost`, cleared by the owner
        self.progress = 0

        self._engine_ready = asyncio.Event()
        # By engine index. Arrays, because every request compares and counts all engines.
        self._outstanding = np.zeros(len(self.engines), dtype=np.int64)  # completions in flight
        self._sticky_episodes = np.zeros(len(self.engines), dtype=np.int64)  # episodes whose sticky engine it is
        self._busy_seconds = 0.0  # summed over engines, until `_counted_until`
        self._counted_until = time.perf_counter()

    @property
    def alive(self) -> list[RolloutEngine]:
        return [engine for index, engine in enumerate(self.engines) if index not in self.lost]

    def mark_lost(self, engine: RolloutEngine, cause: EngineLost) -> None:
        """Send no more requests to this engine. No effect if it was replaced already."""
        for index, current in enumerate(self.engines):
            if current is engine:
                self.lost[index] = cause
                self.engine_lost.set()

    def replace(self, index: int, engine: RolloutEngine) -> None:
        """Put a new engine at the index of a lost one. It counts as lost until `mark_ready`."""
        self.engines[index] = engine
        self.progress += 1

    def mark_ready(self, index: int) -> None:
        del self.lost[index]
        self._engine_ready.set()

    async def wait_for_any(self) -> None:
        while len(self.lost) == len(self.engines):
            self._engine_ready.clear()
            await self._engine_ready.wait()

    @asynccontextmanager
    async def least_busy(self, completions: int) -> AsyncIterator[tuple[str, RolloutEngine]]:
        """Yield the name and the engine with the fewest outstanding completions; count `completions` more for it.

        An `EngineLost` raised in the block marks the engine lost.
        """
        await self.wait_for_any()
        async with self._request(self._least_loaded(), completions) as named_engine:
            yield named_engine

    @contextmanager
    def sticky_engine(self, episodes: int) -> Iterator["StickyEngine"]:
        """Give the turns of `episodes` episodes of one prompt an engine of their own choice, which they keep."""
        sticky_engine = StickyEngine(self, episodes)
        try:
            yield sticky_engine
        finally:
            sticky_engine.leave()

    def _least_loaded(self) -> int:
        """Return the index of the engine with the least load that is not lost: the first one of equals."""
        load = self._outstanding + self._sticky_episodes
        if self.lost:
            load[list(self.lost)] = LOST_LOAD
        return int(load.argmin())

    @asynccontextmanager
    async def _request(self, index: int, completions: int) -> AsyncIterator[tuple[str, RolloutEngine]]:
        engine = self.engines[index]
        self._count(index, completions)
        try:
            yield f"engine {index}", engine
        except EngineLost as error:
            self.mark_lost(engine, error)
            raise
        finally:
            self.progress += 1
            self._count(index, -completions)

    async def each(
        self,
        method: Callable[Concatenate[RolloutEngine, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> dict[int, T]:
        """Call a method of `RolloutEngine` on every alive engine concurrently.

        Returns:
            The results by engine index. Engines that are lost by the call are marked lost and left out.

        Raises:
            EngineError: An engine refused the call.
        """

        async def call(index: int, engine: RolloutEngine) -> tuple[int, T] | None:
            try:
                return index, await getattr(engine, method.__name__)(*args, **kwargs)
            except EngineLost as error:
                self.mark_lost(engine, error)
                return None
            finally:
                self.progress += 1

        alive = [(index, engine) for index, engine in enumerate(self.engines) if index not in self.lost]
        results = await asyncio.gather(*(call(index, engine) for index, engine in alive))
        return dict(result for result in results if result is not None)

    def describe(self) -> str:
        """Describe how many engines are ready and why the others are not, in one line."""
        lost = "".join(f", engine {index} is lost: {one_line(cause)}" for index, cause in sorted(self.lost.items()))
        return f"{len(self.alive)} of {len(self.engines)} engines ready{lost}"

    def busy_seconds(self) -> float:
        """Return the seconds with requests in flight since the pool was created, as the mean over engines."""
        self._count_time()
        return self._busy_seconds / len(self.engines)

    def _count(self, index: int, completions: int) -> None:
        self._count_time()
        self._outstanding[index] += completions

    def _count_time(self) -> None:
        now = time.perf_counter()
        busy_engines = int(np.count_nonzero(self._outstanding))
        self._busy_seconds += (now - self._counted_until) * busy_engines
        self._counted_until = now


@dataclass(eq=False, slots=True)
class StickyEngine:
    """The engine of a group of episodes. It changes only when that engine is lost."""

    _pool: EnginePool
    _episodes: int
    _index: int | None = None

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[tuple[str, RolloutEngine]]:
        """Yield the name and the engine, for one completion. As `EnginePool.least_busy` otherwise."""
        await self._pool.wait_for_any()
        if self._index is None or self._index in self._pool.lost:
            self.leave()
            self._index = self._pool._least_loaded()
            self._pool._sticky_episodes[self._index] += self._episodes

        async with self._pool._request(self._index, 1) as named_engine:
            yield named_engine

    def leave(self) -> None:
        if self._index is not None:
            self._pool._sticky_episodes[self._index] -= self._episodes
            self._index = None

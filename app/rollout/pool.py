"""Balances groups over engines, by outstanding completions, and records which engines are lost.

Invariants:
    - A lost engine gets no request until `mark_ready`. While all engines are lost, groups wait.
    - Whoever replaces engines must end the run if it cannot, so that no group waits forever.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from app.errors import EngineLost
from app.protocols import RolloutEngine

P = ParamSpec("P")
T = TypeVar("T")


class EnginePool:
    """The engines of a run.

    Lifecycle of an engine:
        1. Ready: `least_busy` and `each` use it.
        2. Lost: by an `EngineLost` in a call, or by `mark_lost`. `engine_lost` is set.
        3. Replaced: the owner puts a new engine into `engines` at the same index, then calls `mark_ready`.
    """

    def __init__(self, engines: Sequence[RolloutEngine]):
        self.engines = list(engines)
        self.lost: dict[int, EngineLost] = {}  # engine index → cause
        self.engine_lost = asyncio.Event()  # set by `mark_lost`, cleared by the owner

        self._engine_ready = asyncio.Event()
        self._outstanding = [0] * len(self.engines)  # completions in flight, by engine index
        self._busy_seconds = 0.0  # summed over engines, until `_counted_until`
        self._counted_until = time.perf_counter()

    @property
    def alive(self) -> list[RolloutEngine]:
        """The engines that are not lost."""
        return [engine for index, engine in enumerate(self.engines) if index not in self.lost]

    def mark_lost(self, engine: RolloutEngine, cause: EngineLost) -> None:
        """Send no more requests to this engine. No effect if it was replaced already."""
        for index, current in enumerate(self.engines):
            if current is engine:
                self.lost[index] = cause
                self.engine_lost.set()

    def mark_ready(self, index: int) -> None:
        """Send requests to the (new) engine at this index."""
        del self.lost[index]
        self._engine_ready.set()

    async def wait_for_any(self) -> list[RolloutEngine]:
        """Return the engines that are not lost. Waits while there are none."""
        while not self.alive:
            self._engine_ready.clear()
            await self._engine_ready.wait()
        return self.alive

    @asynccontextmanager
    async def least_busy(self, completions: int) -> AsyncIterator[tuple[str, RolloutEngine]]:
        """Yield the name and the engine with the fewest outstanding completions; count `completions` more for it.

        An `EngineLost` raised in the block marks the engine lost.
        """
        await self.wait_for_any()
        ready = [index for index in range(len(self.engines)) if index not in self.lost]
        index = min(ready, key=self._outstanding.__getitem__)
        engine = self.engines[index]

        self._count(index, completions)
        try:
            yield f"engine {index}", engine
        except EngineLost as error:
            self.mark_lost(engine, error)
            raise
        finally:
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

        alive = [(index, engine) for index, engine in enumerate(self.engines) if index not in self.lost]
        results = await asyncio.gather(*(call(index, engine) for index, engine in alive))
        return dict(result for result in results if result is not None)

    def busy_seconds(self) -> float:
        """Return the seconds with requests in flight since the pool was created, as the mean over engines."""
        self._count_time()
        return self._busy_seconds / len(self.engines)

    def _count(self, index: int, completions: int) -> None:
        self._count_time()
        self._outstanding[index] += completions

    def _count_time(self) -> None:
        now = time.perf_counter()
        busy_engines = sum(1 for outstanding in self._outstanding if outstanding)
        self._busy_seconds += (now - self._counted_until) * busy_engines
        self._counted_until = now

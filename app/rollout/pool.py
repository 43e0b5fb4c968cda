"""Shares groups among engines: the one with the least outstanding work first. Knows which of them are lost.

Always holds: a lost engine is asked for nothing until another one was put in its place; while all are lost, groups wait
for that. Whoever replaces engines ends the run when it cannot, so nobody waits in vain.
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
    """Several engines as one."""

    def __init__(self, engines: Sequence[RolloutEngine]):
        self.engines = list(engines)
        self.lost: dict[int, EngineLost] = {}  # place → why
        self.engine_lost = asyncio.Event()  # set when an engine was lost
        self._changed = asyncio.Event()  # set when one came back
        self._outstanding = [0] * len(self.engines)  # completions asked for and not there yet
        self._busy, self._counted_at = 0.0, time.perf_counter()  # engine-seconds with work, and until when

    @property
    def alive(self) -> list[RolloutEngine]:
        return [engine for place, engine in enumerate(self.engines) if place not in self.lost]

    def mark_lost(self, engine: RolloutEngine, why: EngineLost) -> None:
        """Ask this engine for nothing more. Harmless for one that was replaced meanwhile."""
        for place, known in enumerate(self.engines):
            if known is engine:
                self.lost[place] = why
                self.engine_lost.set()

    def mark_ready(self, place: int) -> None:
        """The engine in this place may be asked again."""
        del self.lost[place]
        self._changed.set()

    async def wait_for_any(self) -> list[RolloutEngine]:
        """The living engines, as soon as there are any."""
        while not self.alive:
            self._changed.clear()
            await self._changed.wait()
        return self.alive

    @asynccontextmanager
    async def least_busy(self, work: int) -> AsyncIterator[tuple[str, RolloutEngine]]:
        """The engine with the least to do, for `work` completions, and its name; notes when it is lost."""
        await self.wait_for_any()
        places = [place for place in range(len(self.engines)) if place not in self.lost]
        place = min(places, key=self._outstanding.__getitem__)
        engine = self.engines[place]
        self._account(place, work)
        try:
            yield f"engine {place}", engine
        except EngineLost as error:
            self.mark_lost(engine, error)
            raise
        finally:
            self._account(place, -work)

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
        """Time that an engine had something to do, the mean over engines, since the pool was made."""
        self._account()
        return self._busy / len(self.engines)

    def _account(self, place: int = 0, work: int = 0) -> None:
        now = time.perf_counter()
        self._busy += (now - self._counted_at) * sum(1 for asked in self._outstanding if asked)
        self._counted_at = now
        self._outstanding[place] += work

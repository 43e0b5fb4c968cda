"""Shares groups among engines: the one with the least outstanding work first. Knows which of them are lost.

Always holds: a lost engine is asked for nothing until another one was put in its place; while all are lost, groups wait
for that. Whoever replaces engines ends the run when it cannot, so nobody waits in vain.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from app.errors import EngineLost
from app.protocols import RolloutEngine


class EnginePool:
    """Several engines as one."""

    def __init__(self, engines: Sequence[RolloutEngine]):
        self.engines = list(engines)
        self.lost: dict[int, EngineLost] = {}  # place → why
        self.loss = asyncio.Event()  # set when an engine was lost
        self._changed = asyncio.Event()  # set when one came back
        self._outstanding = [0] * len(self.engines)  # completions asked for and not there yet
        self._busy, self._counted_at = 0.0, time.perf_counter()  # engine-seconds with work, and until when

    @property
    def living(self) -> list[RolloutEngine]:
        return [engine for place, engine in enumerate(self.engines) if place not in self.lost]

    def lose(self, engine: RolloutEngine, why: EngineLost) -> None:
        """Ask this engine for nothing more. Harmless for one that was replaced meanwhile."""
        for place, known in enumerate(self.engines):
            if known is engine:
                self.lost[place] = why
                self.loss.set()

    def restore(self, place: int) -> None:
        """The engine in this place may be asked again."""
        del self.lost[place]
        self._changed.set()

    async def some(self) -> list[RolloutEngine]:
        """The living engines, as soon as there are any."""
        while not self.living:
            self._changed.clear()
            await self._changed.wait()
        return self.living

    @asynccontextmanager
    async def least_busy(self, work: int) -> AsyncIterator[tuple[str, RolloutEngine]]:
        """The engine with the least to do, for `work` completions, and its name; notes when it is lost."""
        await self.some()
        places = [place for place in range(len(self.engines)) if place not in self.lost]
        place = min(places, key=self._outstanding.__getitem__)
        engine = self.engines[place]
        self._account(place, work)
        try:
            yield f"engine {place}", engine
        except EngineLost as error:
            self.lose(engine, error)
            raise
        finally:
            self._account(place, -work)

    async def broadcast(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on every living engine at once: the answers, without those of engines that are lost by it."""
        answers = await asyncio.gather(*(self._ask(engine, method, arguments) for engine in self.living))
        return [answer for each in answers for answer in each]

    async def _ask(self, engine: Any, method: str, arguments: Sequence[object]) -> list[Any]:
        try:
            return [await getattr(engine, method)(*arguments)]
        except EngineLost as error:
            self.lose(engine, error)
            return []

    def busy_seconds(self) -> float:
        """Time that an engine had something to do, the mean over engines, since the pool was made."""
        self._account()
        return self._busy / len(self.engines)

    def _account(self, place: int = 0, work: int = 0) -> None:
        now = time.perf_counter()
        self._busy += (now - self._counted_at) * sum(1 for asked in self._outstanding if asked)
        self._counted_at = now
        self._outstanding[place] += work

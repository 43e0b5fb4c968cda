"""Shares groups among engines: the one with the least outstanding work first."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from app.protocols import RolloutEngine
from app.types import Completion, GroupRequest


class EnginePool:
    """Several engines as one."""

    def __init__(self, engines: Sequence[RolloutEngine]):
        self.engines = list(engines)
        self._outstanding = [0] * len(self.engines)  # completions asked for and not there yet
        self._busy, self._counted_at = 0.0, time.perf_counter()  # engine-seconds with work, and until when

    async def generate(self, request: GroupRequest) -> list[Completion]:
        """One group, on whichever engine has the least to do."""
        async with self._least_busy(request.group_size) as engine:
            return await engine.generate(request)

    async def broadcast(self, method: str, *arguments: object) -> None:
        """Call a method on every engine at once."""
        await asyncio.gather(*(getattr(engine, method)(*arguments) for engine in self.engines))

    @asynccontextmanager
    async def _least_busy(self, work: int) -> AsyncIterator[RolloutEngine]:
        index = min(range(len(self.engines)), key=self._outstanding.__getitem__)
        self._account()
        self._outstanding[index] += work
        try:
            yield self.engines[index]
        finally:
            self._account()
            self._outstanding[index] -= work

    def busy_seconds(self) -> float:
        """Time that an engine had something to do, the mean over engines, since the pool was made."""
        self._account()
        return self._busy / len(self.engines)

    def _account(self) -> None:
        now = time.perf_counter()
        self._busy += (now - self._counted_at) * sum(1 for work in self._outstanding if work)
        self._counted_at = now

"""Shares groups among engines: the one with the least outstanding work first."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from app.protocols import RolloutEngine
from app.types import Completion, GroupRequest


class EnginePool:
    """Several engines as one."""

    def __init__(self, engines: Sequence[RolloutEngine]):
        self.engines = list(engines)
        self._outstanding = [0] * len(self.engines)  # completions asked for and not there yet

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
        self._outstanding[index] += work
        try:
            yield self.engines[index]
        finally:
            self._outstanding[index] -= work

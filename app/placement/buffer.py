"""Groups that wait to be trained on: bounded, in order of arrival, checked for staleness when they are taken.

The bound is `(max_staleness + 1) · prompts_per_step` groups. Admission keeps it, so `put` never has to wait; a put
beyond it is a bug and raises.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from app.types import Group


class GroupBuffer:
    def __init__(self, capacity: int):
        self.capacity = capacity  # groups
        self._groups: deque[Group] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        if len(self._groups) >= self.capacity:
            raise OverflowError(f"the buffer holds {self.capacity} groups already")
        self._groups.append(group)
        self._arrived.set()

    def put_back(self, groups: Sequence[Group]) -> None:
        """To the head, in this order: what an aborted step had been fed."""
        self._groups.extendleft(reversed(groups))
        if groups:
            self._arrived.set()

    async def take(self, most: int, *, is_fresh: Callable[[Group], bool]) -> tuple[list[Group], list[Group]]:
        """Wait until there is something; then up to `most` usable groups, and the unusable ones met on the way."""
        await self._arrived.wait()
        taken: list[Group] = []
        stale: list[Group] = []
        while self._groups and len(taken) < most:
            group = self._groups.popleft()
            (taken if is_fresh(group) else stale).append(group)
        if not self._groups:
            self._arrived.clear()
        return taken, stale

    def wake(self) -> None:
        """Let a waiting `take` return with nothing, so that it can look around."""
        self._arrived.set()

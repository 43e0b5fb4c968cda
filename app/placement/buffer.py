"""The bounded buffer between producer and consumer. Oldest policy version first, then first in, first out.

A long completion arrives late, with an old version. Behind all groups that arrived before it, it would often be too
stale by the time it is taken.

The bound is `(max_staleness + 1) · prompts_per_step` groups. Admission enforces it, so `put` never waits.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from app.types import Group


class GroupBuffer:
    """Groups waiting to be trained on.

    Example: `fresh, stale = await buffer.take(4, is_fresh=lambda group: group.oldest_version >= 3)`
    """

    def __init__(self, capacity: int):
        self.capacity = capacity  # groups
        self._groups: deque[tuple[int, Group]] = deque()  # with their oldest versions, computed once
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Add a group, before all groups of newer versions. Raises `OverflowError` if full: admission has a bug."""
        if len(self._groups) >= self.capacity:
            raise OverflowError(f"the buffer already holds {self.capacity} groups")

        position = len(self._groups)
        version = group.oldest_version
        while position and self._groups[position - 1][0] > version:
            position -= 1
        self._groups.insert(position, (version, group))
        self._arrived.set()

    async def take(self, limit: int, *, is_fresh: Callable[[Group], bool]) -> tuple[list[Group], list[Group]]:
        """Wait until the buffer is not empty or `wake` is called, then remove groups from its head.

        Returns:
            Up to `limit` fresh groups, and the stale ones removed along with them.
        """
        await self._arrived.wait()

        fresh: list[Group] = []
        stale: list[Group] = []
        while self._groups and len(fresh) < limit:
            _, group = self._groups.popleft()
            if is_fresh(group):
                fresh.append(group)
            else:
                stale.append(group)

        if not self._groups:
            self._arrived.clear()
        return fresh, stale

    def wake(self) -> None:
        """Make a waiting `take` return without groups."""
        self._arrived.set()

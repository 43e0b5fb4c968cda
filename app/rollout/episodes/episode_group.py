"""The episodes of one prompt that are played together."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from app.rollout.engine.pool import StickyEngine
from app.rollout.requests import Aborted, Requests
from app.types import Prompt, Sampling, Trajectory
from app.utils.tasks import gather_or_raise
from app.worker.failures import FailureWindow


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group to be played."""

    prompt: Prompt
    size: int
    sampling: Sampling  # max_tokens: of a trajectory
    version: Callable[[], int]  # synced last
    training: bool
    on_sent: Callable[[], None]  # before the first request of its episodes, which may wait long for a worker


class EpisodeGroup:
    """The episodes of one prompt that are being played."""

    def __init__(self, spec: GroupSpec, sticky_engine: StickyEngine, requests: Requests):
        self.spec = spec
        self.sticky_engine = sticky_engine
        self.requests = requests
        self.trajectories: dict[int, Trajectory] = {}  # by member; those that failed are missing
        self.sampled_tokens = 0
        self.aborted = False  # as too stale
        self._is_sent = False
        self._playing: asyncio.Future[None] | None = None

    async def run(self, member: Callable[["EpisodeGroup", int], Coroutine[Any, Any, None]]) -> None:
        async def members() -> None:
            await gather_or_raise(*(member(self, number) for number in range(self.spec.size)))

        self._playing = asyncio.ensure_future(members())
        try:
            await self._playing
        except (Aborted, asyncio.CancelledError) as error:
            if isinstance(error, Aborted) or self.aborted:
                raise Aborted(self.spec.prompt.id, self.sampled_tokens) from None
            raise

    def before_request(self) -> None:
        if not self._is_sent:
            self._is_sent = True
            self.spec.on_sent()

    def abort(self) -> None:
        if self._playing is not None:
            self.aborted = True
            self._playing.cancel()


def episode_failures(max_fraction: float, window: int, warn: Callable[[str], None]) -> FailureWindow:
    """Return the counter of failed episodes. One that failed for good has no reward: it leaves its group."""
    consequence = (
        "It is played again, at most environment.retries times, and then left out of its group; all failures are in "
        "logs/environment.log."
    )
    key = "environment.max_failed_fraction"
    return FailureWindow("episodes failed in every attempt", key, max_fraction, window, consequence, warn)

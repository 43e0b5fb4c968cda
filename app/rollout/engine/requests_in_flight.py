"""The requests that a server samples: their admission, their ids, their tokens, and how they are aborted."""

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.errors import EngineError
from app.rollout.engine.client import spans_in_place
from app.rollout.engine.server_connection import ServerConnection
from app.rollout.progress import ProgressClock
from app.types import Completion, EngineStats, GroupRequest, InFlight
from app.utils.tasks import gather_or_raise

if TYPE_CHECKING:
    from app.rollout.engine.served_adapters import Adapter

IDLE_POLL_S = 0.02
MAX_ABORT_CALLS = 64  # at a time


@dataclass(slots=True)
class GroupInFlight:
    """The requests of one prompt, or of one turn of an episode, that the server has."""

    prompt_id: str
    request_ids: list[str]  # SGLang's
    cache_key: str  # prefixes are reused only within one
    adapter: "Adapter | None" = None
    abort_requested: bool = False
    paused_in_place: bool = False  # a sync in place may have happened meanwhile
    retracting_pauses: int = 0  # that the server retracted its requests for


class RequestsInFlight:
    """The groups in flight on one server, by the name of their request."""

    def __init__(self, name: str, connection: ServerConnection):
        self.progress = ProgressClock()
        self.host_id = secrets.token_hex(4)  # several hosts may share a server
        self._name = name
        self._connection = connection
        self._groups: dict[str, GroupInFlight] = {}
        self._calls = itertools.count()
        self._completion_tokens = 0  # sampled so far, by requests that ended
        self._pauses = 0  # KV cache from before the last pause is of an older policy
        self._abort_alls = 0  # calls that aborted everything so far
        self._admitting = asyncio.Event()  # cleared from a pause until `admit_again`
        self._admitting.set()

    @property
    def by_name(self) -> dict[str, list[str]]:
        return {name: group.request_ids for name, group in self._groups.items()}

    @property
    def stats(self) -> EngineStats:
        """The groups in flight and the completion tokens so far, as of the last report of the server."""
        running = sum(self.progress.tokens(group.request_ids) for group in self._groups.values())
        return EngineStats(len(self._groups), self._completion_tokens + running, self.progress.beats)

    async def admit(self, request: GroupRequest) -> None:
        """Wait while the engine drains or is paused. Raises `EngineError` if everything is aborted meanwhile."""
        abort_alls = self._abort_alls
        while not self._admitting.is_set():
            await self._connection.race(self._admitting.wait())
        if self._abort_alls != abort_alls:
            # The caller may have been cancelled and may retry the same prompt.
            raise EngineError(f"{self._name}: prompt {request.name} was aborted before it was admitted")
        if request.name in self._groups:
            raise EngineError(f"{self._name}: prompt {request.name} is in flight already")

    async def sample(self, request: GroupRequest, adapter: "Adapter | None") -> list[Completion]:
        """Sample an admitted group, which is in flight meanwhile."""
        # Never used before: a server refuses ids of requests that were cancelled.
        call = f"{self.host_id}-{next(self._calls)}"
        request_ids = [f"{call}/{request.name}#{member}" for member in range(request.group_size)]
        group = GroupInFlight(request.prompt_id, request_ids, f"{self.host_id}-{self._pauses}", adapter)
        self._groups[request.name] = group
        try:
            completions = await self._connection.race(self._sample(request, group))
        except BaseException:
            self._completion_tokens += self.progress.tokens(group.request_ids)
            raise
        finally:
            del self._groups[request.name]

        self._completion_tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    async def drain(self) -> None:
        while self._groups:
            await self._connection.race(asyncio.sleep(IDLE_POLL_S))

    def begin_pause(self) -> None:
        """Admit nothing from now on, and give later requests another key: they must not use the KV cache so far."""
        self._admitting.clear()
        self._pauses += 1

    def paused(self, in_flight: InFlight) -> None:
        """Note what a pause did to the requests in flight. In place they keep their KV cache, whatever is synced."""
        for group in self._groups.values():
            group.paused_in_place |= in_flight is InFlight.in_place
            group.retracting_pauses += in_flight is InFlight.retract

    def admit_again(self) -> None:
        self._admitting.set()

    async def abort(self, prompt_ids: Sequence[str] | None) -> None:
        """Abort the requests of these prompts, or all requests (None), those that wait for admission included."""
        if prompt_ids is not None:
            named = set(prompt_ids)
            await self._abort([group for group in self._groups.values() if group.prompt_id in named])
            return

        for group in self._groups.values():
            group.abort_requested = True
        self._abort_alls += 1
        await self._connection.control("/abort_request", {"abort_all": True, "rid": ""})

    async def abort_adapter(self, adapter: "Adapter") -> None:
        await self._abort([group for group in self._groups.values() if group.adapter is adapter])

    async def _abort(self, groups: Sequence[GroupInFlight]) -> None:
        for group in groups:
            group.abort_requested = True
        limit = asyncio.Semaphore(MAX_ABORT_CALLS)

        async def abort_one(request_id: str) -> None:
            async with limit:
                await self._connection.control("/abort_request", {"rid": request_id})

        await gather_or_raise(*(abort_one(each) for group in groups for each in group.request_ids))

    async def _sample(self, request: GroupRequest, group: GroupInFlight) -> list[Completion]:
        """Sample a group. Raises `EngineError` if the server aborted a request by itself."""
        adapter = group.adapter
        name = adapter.name if adapter else None
        request = replace(request, version=adapter.version) if adapter else request
        client = self._connection.client()
        replies = await client.generate(request, group.request_ids, cache_key=group.cache_key, adapter=name)

        reasons = [reply.abort_reason for reply in replies if reply.abort_reason is not None]
        if reasons and not group.abort_requested:
            raise EngineError(
                f"{self._name} aborted {len(reasons)} of {len(replies)} completions of prompt {request.name} "
                f"by itself: {reasons[0]}"
            )
        sampled = [(reply.completion, reply.tokens_at_once) for reply in replies]
        if group.paused_in_place and adapter is None:
            return [replace(each, spans=spans_in_place(each.spans, request.version, n)) for each, n in sampled]
        # SGLang 0.5.23 also counts a pause as a retraction, unless the request was queued: this is a lower bound.
        return [replace(each, retractions=max(0, each.retractions - group.retracting_pauses)) for each, _ in sampled]

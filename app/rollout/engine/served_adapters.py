"""The adapters of one server: which one new requests name, and when earlier ones are unloaded.

Invariants:
    - Every load has a name of its own, also for a version that was loaded before: SGLang cannot replace an adapter.
    - An adapter is unloaded only after the last request that names it. SGLang's unload waits for such requests, and
      holds a lock meanwhile that every load needs; on a paused server it would wait until `resume`.
    - A load never exceeds the server's limit, at which SGLang itself would unload an adapter that may be in use.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from app.errors import EngineError, one_line
from app.rollout.engine.client import NoAnswer

MIN_ADAPTERS = 2  # the adapter in use, and the one that is being loaded
log = logging.getLogger(__name__)
Post = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]  # route, body → reply


@dataclass(eq=False, slots=True)
class Adapter:
    """One load of a policy version."""

    name: str  # the server's
    version: int
    requests: int = 0  # in flight
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    refused: bool = False  # an unload failed; tried again after the next load

    def __post_init__(self) -> None:
        self.unused.set()


@dataclass(eq=False)
class Adapters:
    """Loads and unloads the adapters of one server.

    Attributes:
        host_id: Keeps adapter names unique when several hosts share one server.
        limit: Maximum number of adapters loaded on the server.
        abort_timeout_s: Deadline for aborted requests to end.
        post: Posts to the server. Raises `EngineError`.
        abort: Aborts the requests in flight that name an adapter.
    """

    engine: str
    host_id: str
    limit: int
    abort_timeout_s: float
    post: Post
    abort: Callable[[Adapter], Awaitable[None]]
    _loads: Iterator[int] = field(default_factory=itertools.count)
    _loaded: list[Adapter] = field(default_factory=list)  # oldest first
    _current: Adapter | None = None
    _paused: bool = False
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one load or unload at a time
    _unloads: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def for_request(self) -> Iterator[Adapter]:
        """Yield the adapter of a new request; it stays loaded until the block ends.

        Raises:
            EngineError: None was loaded yet.
        """
        adapter = self._current
        if adapter is None:
            raise EngineError(
                f"{self.engine} has no adapter yet: the first weight sync loads one, and without it the model itself "
                "would answer"
            )

        adapter.requests += 1
        adapter.unused.clear()
        try:
            yield adapter
        finally:
            adapter.requests -= 1
            if not adapter.requests:
                adapter.unused.set()
                self._begin_unload()

    async def load(self, version: int, body: Mapping[str, Any]) -> int:
        """Load an adapter for every later request, and unload those that no request uses.

        Returns:
            Adapters that are loaded now.

        Raises:
            EngineError: The server refused it, or did not reply. The adapter before it stays in force.
        """
        async with self._changing:
            await self._make_room()
            adapter = Adapter(f"policy-v{version}-{self.host_id}-{next(self._loads)}", version)
            reply = await self._load(adapter, body)
            self._current = adapter
            self._forget_missing(reply)
            await self._unload_unused()
            return len(self._loaded)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._begin_unload()

    def close(self) -> None:
        for task in self._unloads:
            task.cancel()

    async def _load(self, adapter: Adapter, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._loaded.append(adapter)
        try:
            route = "/load_lora_adapter" if "lora_path" in body else "/load_lora_adapter_from_tensors"
            return await self.post(route, {**body, "lora_name": adapter.name})
        except NoAnswer:
            raise  # the server may have loaded it: it counts, and is unloaded later
        except EngineError:
            self._loaded.remove(adapter)
            raise

    async def _make_room(self) -> None:
        """Abort the requests of the oldest adapters, and unload them, until one more may be loaded."""
        while len(self._loaded) >= self.limit:
            oldest = next(each for each in self._loaded if each is not self._current)
            if oldest.requests:
                await self._end_requests(oldest)
            try:
                await self._unload(oldest)
            except NoAnswer:
                raise
            # It is gone, or unused and the first that SGLang itself would unload for another.
            except EngineError as error:
                log.warning("%s: %s is left to the server: %s", self.engine, oldest.name, one_line(error))
                self._loaded.remove(oldest)

    async def _end_requests(self, adapter: Adapter) -> None:
        log.warning(
            "%s: aborting %d requests of policy %d, whose adapter is the oldest of %d: the server holds no more",
            self.engine,
            adapter.requests,
            adapter.version,
            len(self._loaded),
        )
        await self.abort(adapter)
        try:
            await asyncio.wait_for(adapter.unused.wait(), self.abort_timeout_s)
        except TimeoutError:
            raise EngineError(
                f"{self.engine}: aborted requests of policy {adapter.version} did not end within "
                f"rollout.stall_timeout_s={self.abort_timeout_s:.0f} s, so that no adapter can be loaded"
            ) from None

    def _begin_unload(self) -> None:
        async def unload_in_turn() -> None:
            async with self._changing:
                await self._unload_unused()

        if len(self._loaded) >= MIN_ADAPTERS:
            task = asyncio.get_running_loop().create_task(unload_in_turn())
            self._unloads.add(task)
            task.add_done_callback(self._unloads.discard)

    async def _unload_unused(self) -> None:
        for adapter in list(self._loaded):
            in_use = adapter is self._current or adapter.requests > 0
            if in_use or adapter.refused or self._paused:
                continue
            try:
                await self._unload(adapter)
            except EngineError as error:
                adapter.refused = True
                log.warning("%s: %s stays loaded until the next load: %s", self.engine, adapter.name, one_line(error))

    async def _unload(self, adapter: Adapter) -> None:
        await self.post("/unload_lora_adapter", {"lora_name": adapter.name})
        self._loaded.remove(adapter)

    def _forget_missing(self, reply: Mapping[str, Any]) -> None:
        """Drop adapters whose unload failed and that the server does not have, and try the others again."""
        present = reply.get("loaded_adapters")
        for adapter in [each for each in self._loaded if each.refused]:
            adapter.refused = False
            if present is not None and adapter.name not in present:
                self._loaded.remove(adapter)


def adapter_limit(engine: str, url: str, info: Mapping[str, Any]) -> int:
    """Return how many adapters a server may have loaded, from its `/server_info`.

    Raises:
        EngineError: It serves no adapters, or too few.
    """
    if not info.get("enable_lora"):
        raise EngineError(
            f"{engine} at {url} serves no adapters: with model.lora, servers of rollout.urls must run with "
            "--enable-lora"
        )
    limit = info.get("max_loaded_loras") or info.get("max_loras_per_batch") or MIN_ADAPTERS
    if int(limit) < MIN_ADAPTERS:
        raise EngineError(
            f"{engine} at {url} runs with --max-loaded-loras {limit}: a sync needs at least {MIN_ADAPTERS}, for the "
            "adapter in use and the next one"
        )
    return int(limit)

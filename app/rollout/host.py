"""The host of one engine: a Ray actor that owns the SGLang process and the HTTP client.

JSON is parsed and tokens are decoded here and not in the driver, whose time is shared by all engines. When the server
dies or stops making progress, every request in flight fails with an error that names the engine and shows the end of
its log.
"""

import asyncio
import itertools
import os
import secrets
import zlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from app.errors import EngineError, EngineLost
from app.model.hf_directory import load_tokenizer
from app.rollout.client import Client, ConnectionLost, NoAnswer
from app.rollout.server import Server, ServerSpec, free_port
from app.types import Completion, EngineMemory, EngineStats, GroupRequest, InFlight, MemoryUse
from app.utils.process import group_members, log_to, memory_use

HEALTH_POLL_SECONDS = 0.25
STALL_POLL_SECONDS = 5.0
IDLE_POLL_SECONDS = 0.02
CHECK_SECONDS = 10.0
SCHEDULER_ROUTE = "/server_info"  # asks the scheduler; /health is answered by the HTTP side alone
DEATH_SECONDS = 3.0  # from a lost connection until the operating system tells of the server's death
MEMORY_TAGS = {EngineMemory.weights: "weights", EngineMemory.kv_cache: "kv_cache", EngineMemory.graphs: "cuda_graph"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostSpec:
    """What a host is made with: a server of its own, or the address of one that already runs."""

    name: str
    seed: int
    start_timeout_s: float
    stall_timeout_s: float
    releases_memory: bool  # False: release and reload do nothing (the CPU has nothing to free)
    log: Path
    server: ServerSpec | None = None
    url: str | None = None
    key: str | None = None


class EngineHost:
    """Implements `RolloutEngine` (app/protocols.py) for one server."""

    def __init__(self, spec: HostSpec):
        log_to(spec.log)
        self.spec = spec
        self._server = Server(spec.server) if spec.server else None
        self._client: Client | None = None
        self._running: dict[str, list[str]] = {}  # prompt id → names of its members
        self._name = secrets.token_hex(4)  # that no other host uses
        self._calls = itertools.count()
        self._pauses = 0  # what was cached before the last of them is of an older policy
        self._tokens = 0
        self._paused = False
        self._released: set[EngineMemory] = set()
        self._open = asyncio.Event()  # cleared while draining
        self._open.set()
        self._failure: asyncio.Future[EngineError] | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._tokenizer: Any = None  # of a server of our own; of another one the driver's is the one to trust

    async def start(self) -> dict[str, Any]:
        """Start the server (or find the running one) and wait for its health; returns what it says of itself."""
        self._failure = asyncio.get_running_loop().create_future()
        if self._server is not None:
            await self._server.start()
            self._watchers.append(asyncio.create_task(self._watch_death(self._server)))
            server = self._server.spec
            self._client = Client(self.spec.name, address(server.host, server.port), server.key)
            trusted = bool(server.flags.get("trust-remote-code"))
            self._tokenizer = await asyncio.to_thread(
                load_tokenizer, Path(server.model_path), trust_remote_code=trusted
            )
        else:
            assert self.spec.url is not None
            self._client = Client(self.spec.name, self.spec.url, self.spec.key)
        await self._or_failure(self._wait_healthy(self._client))
        self._watchers.append(asyncio.create_task(self._watch_progress(self._client)))
        info = await self._or_failure(self._client.get("/server_info"))
        return {
            "url": self._client.url,
            "version": str(info.get("version", "")),
            "pid": self._server and self._server.pid,
        }

    async def stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()

    async def generate(self, request: GroupRequest) -> list[Completion]:
        client = self._ready()
        await self._or_failure(self._open.wait())
        if request.prompt_id in self._running:
            raise EngineError(f"{self.spec.name}: prompt {request.prompt_id} is in flight already")
        names = self._running[request.prompt_id] = self._members(request)
        try:
            completions = await self._or_failure(
                client.generate(request, names, self._seeds(request), cache=f"{self._name}-{self._pauses}")
            )
        finally:
            del self._running[request.prompt_id]
        self._tokens += sum(len(completion.token_ids) for completion in completions)
        return completions if self._tokenizer is None else await asyncio.to_thread(self._decoded, completions)

    async def pause(self, in_flight: InFlight) -> None:
        """Whatever is asked for after this waits for `resume`: a paused engine may be half updated."""
        if self._paused:
            return
        self._pauses += 1
        if in_flight is InFlight.drain:
            self._open.clear()
            while self._running:
                await self._or_failure(asyncio.sleep(IDLE_POLL_SECONDS))
            in_flight = InFlight.retract  # nothing is left to retract
        await self._control("/pause_generation", {"mode": in_flight.value})
        self._paused = True

    async def resume(self) -> None:
        if self._paused:
            await self._control("/continue_generation", {})
            self._paused = False
        self._open.set()

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        if prompt_ids is None:
            await self._control("/abort_request", {"abort_all": True, "rid": ""})
            return
        for prompt_id in prompt_ids:
            for name in self._running.get(prompt_id, ()):
                await self._control("/abort_request", {"rid": name})

    async def release(self, region: EngineMemory) -> None:
        """Free a part's device memory; its content is lost. One that is released stays so: the server would crash."""
        if self._running or not self._paused:
            raise EngineError(
                f"{self.spec.name}: {region.name} cannot be released before the engine is paused and idle"
            )
        if region not in self._released:
            if self.spec.releases_memory:
                await self._control("/release_memory_occupation", {"tags": [MEMORY_TAGS[region]]})
            self._released.add(region)

    async def reload(self, region: EngineMemory) -> None:
        if region in self._released:
            if self.spec.releases_memory:
                await self._control("/resume_memory_occupation", {"tags": [MEMORY_TAGS[region]]})
            self._released.discard(region)

    async def update(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._post(f"/{route}", body)

    async def stats(self) -> EngineStats:
        return EngineStats(groups=len(self._running), completion_tokens=self._tokens)

    async def memory(self) -> MemoryUse:
        servers = group_members(self._server.pid) if self._server else []
        return memory_use([os.getpid(), *servers])

    async def check(self) -> None:
        """Raise `EngineLost` if the server is gone or its scheduler does not answer, paused or not."""
        if not await self._or_failure(self._ready().healthy(SCHEDULER_ROUTE, CHECK_SECONDS)):
            self._fail(EngineLost(f"{self.spec.name} did not answer to {SCHEDULER_ROUTE} within {CHECK_SECONDS:.0f} s"))
        self._ready()

    # --- inside

    def _decoded(self, completions: Sequence[Completion]) -> list[Completion]:
        texts = self._tokenizer.batch_decode([c.token_ids.tolist() for c in completions], skip_special_tokens=True)
        return [replace(completion, text=text) for completion, text in zip(completions, texts, strict=True)]

    def _ready(self) -> Client:
        if self._client is None or self._failure is None:
            raise EngineError(f"{self.spec.name} was not started")
        if self._failure.done():
            raise self._failure.result()
        return self._client

    async def _post(self, route: str, body: Mapping[str, Any]) -> Any:
        return await self._or_failure(self._ready().post(route, body))

    async def _control(self, route: str, body: dict[str, Any]) -> None:
        """A call that the server's scheduler answers between two batches, unless it is stuck: then it is lost."""
        try:
            await self._or_failure(self._ready().post(route, body, seconds=self.spec.stall_timeout_s))
        except NoAnswer as error:
            self._fail(EngineLost(f"{error} (rollout.stall_timeout_s)"))
            self._ready()

    def _members(self, request: GroupRequest) -> list[str]:
        """A name for each member. A server refuses one that it still knows, also of a request that was given up."""
        call = f"{self._name}-{next(self._calls)}"
        return [f"{call}/{request.prompt_id}#{member}" for member in range(request.group_size)]

    def _seeds(self, request: GroupRequest) -> list[int]:
        """A seed for each member, from the run's seed and the prompt; members never share one."""
        first = zlib.crc32(f"{self.spec.seed}/{request.prompt_id}".encode()) & 0x3FFFFFFF
        return [first + member for member in range(request.group_size)]

    async def _or_failure(self, work: Awaitable[T]) -> T:
        """The work's result, or the engine's failure if that comes first."""
        assert self._failure is not None
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        both: list[asyncio.Future[Any]] = [task, self._failure]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = task.done()
            if not finished:
                task.cancel()
        if finished and not task.cancelled() and isinstance(gone := task.exception(), ConnectionLost):
            if self._server:  # often the first sign of a death, whose own error says more
                await asyncio.wait([self._failure], timeout=DEATH_SECONDS)
            else:  # whoever comes back at that address may have other weights
                self._fail(EngineLost(str(gone)))
        if self._failure.done() and (not finished or task.exception() is not None):
            raise self._failure.result()
        return task.result()

    def _fail(self, error: EngineError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)

    async def _watch_death(self, server: Server) -> None:
        self._fail(await server.died())

    async def _wait_healthy(self, client: Client) -> None:
        deadline = asyncio.get_running_loop().time() + self.spec.start_timeout_s
        while not await client.healthy():
            if asyncio.get_running_loop().time() > deadline:
                tail = f"; log: {self._server.spec.log}; its last lines:\n{self._server.tail()}" if self._server else ""
                raise EngineError(
                    f"{self.spec.name} at {client.url} did not become healthy within "
                    f"rollout.start_timeout_s={self.spec.start_timeout_s:.0f} s{tail}"
                )
            await asyncio.sleep(HEALTH_POLL_SECONDS)

    async def _watch_progress(self, client: Client) -> None:
        """Fail when requests are in flight and the scheduler produced nothing for `stall_timeout_s`."""
        loop = asyncio.get_running_loop()
        alive_at = loop.time()
        while True:
            await asyncio.sleep(min(STALL_POLL_SECONDS, self.spec.stall_timeout_s / 4))
            seconds = max(2.0, self.spec.stall_timeout_s / 2)
            try:
                alive = not self._running or self._paused or await client.healthy("/health_generate", seconds)
            except EngineError as error:  # our key is refused all of a sudden: somebody else's server
                self._fail(error)
                return
            if alive:
                alive_at = loop.time()
            elif loop.time() - alive_at > self.spec.stall_timeout_s:
                waiting = ", ".join(list(self._running)[:5])
                self._fail(
                    EngineLost(
                        f"{self.spec.name} made no progress for rollout.stall_timeout_s="
                        f"{self.spec.stall_timeout_s:.0f} s with {len(self._running)} prompts in flight ({waiting})"
                    )
                )
                return


def address(host: str, port: int) -> str:
    """The URL of a host and port; IPv6 gets its brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


__all__ = ["EngineHost", "HostSpec", "address", "free_port"]

"""The host of one engine: a Ray actor that owns the SGLang process and its HTTP client.

JSON is parsed and tokens are decoded here instead of in the driver, which serves all engines. If the server dies or
stalls, or loses a request, every request in flight fails with an error that names the engine.
"""

import asyncio
import itertools
import os
import secrets
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from app.errors import EngineError, EngineLost
from app.model.hf_directory import load_tokenizer
from app.rollout.client import Client, ConnectionLost, NoAnswer, spans_in_place
from app.rollout.progress import ProgressClock, ProgressMonitor
from app.rollout.served_adapters import Adapter, Adapters, adapter_limit
from app.rollout.server import Server, ServerSpec
from app.types import Completion, EngineMemory, EngineStart, EngineStats, GroupRequest, InFlight, MemoryUse
from app.utils.net import url_of
from app.utils.process import log_to, memory_use, process_group_members
from app.utils.tasks import gather_or_raise

HEALTH_POLL_SECONDS = 0.05
IDLE_POLL_SECONDS = 0.02
CHECK_SECONDS = 10.0
OLDEST_SGLANG = "0.5.22"  # tests/device/test_versions.py runs it; without a GPU 0.5.21 does not start
SCHEDULER_ROUTE = "/server_info"  # answered by the scheduler; /health needs only the HTTP process
DEATH_SECONDS = 3.0  # from a lost connection until the operating system reports the server's death
MAX_ABORT_CALLS = 64  # at a time
MEMORY_TAGS = {EngineMemory.weights: "weights", EngineMemory.kv_cache: "kv_cache", EngineMemory.graphs: "cuda_graph"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostSpec:
    """Settings of a host. It starts `server`, or uses the running server at `url` with `key`."""

    name: str  # "engine 0"
    start_timeout_s: float
    stall_timeout_s: float
    releases_memory: bool  # False: release and reload do nothing (there is no device memory on CPU)
    log: Path  # of the host; the server has its own
    serves_adapters: bool = False  # True: every request names an adapter, and the weights of the model stay
    server: ServerSpec | None = None
    url: str | None = None
    key: str | None = field(default=None, repr=False)
    # Ray resource and visibility variable: `server` gets the devices that Ray gave to this actor, if it gave any.
    devices: tuple[str, str] | None = None


@dataclass(slots=True)
class GroupInFlight:
    """The requests of one prompt, or of one turn of an episode, that the server has."""

    prompt_id: str
    request_ids: list[str]  # SGLang's
    adapter: Adapter | None = None
    abort_asked: bool = False
    paused_in_place: bool = False  # a sync in place may have happened meanwhile


def own_devices(devices: tuple[str, str] | None) -> dict[str, str]:
    """Return the environment that limits a server to the devices of this Ray actor; empty if it has none.

    Only the actor can tell: after the loss of a node, Ray may have moved it to devices of other numbers.

    Args:
        devices: Ray resource and visibility variable.
    """
    if devices is None:
        return {}

    import ray

    resource, variable = devices
    own = ray.get_runtime_context().get_accelerator_ids().get(resource, [])
    return {variable: ",".join(map(str, own))} if own else {}


class EngineHost:
    """The calls of `RolloutEngine` (app/protocols.py) for one server.

    Lifecycle:
        1. `start` once.
        2. All other calls, any number concurrently.
        3. `stop` once, in any state.
    """

    def __init__(self, spec: HostSpec):
        log_to(spec.log)
        self.spec = spec
        self._server: Server | None = None
        if spec.server is not None:
            environment = {**spec.server.environment, **own_devices(spec.devices)}
            self._server = Server(replace(spec.server, environment=environment))
        self._client: Client | None = None
        # Decodes completions. None for servers of `rollout.urls`: their model directory may not be on this machine.
        self._tokenizer: Any = None
        self._adapters: Adapters | None = None  # until `start`, and where the model itself is trained

        self._in_flight: dict[str, GroupInFlight] = {}  # by name of the request
        self._completion_tokens = 0  # sampled so far, by requests that ended
        self._progress = ProgressClock()
        self._host_id = secrets.token_hex(4)  # several hosts may share a server
        self._calls = itertools.count()

        self._paused = False
        self._pauses = 0  # KV cache from before the last pause is of an older policy
        self._admitting = asyncio.Event()  # cleared from a drain until `resume`
        self._admitting.set()
        self._abort_alls = 0  # calls that aborted everything so far
        self._released: set[EngineMemory] = set()

        self._failure: asyncio.Future[EngineError] | None = None
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> dict[str, Any]:
        """Start the server, or connect to the running one, and wait until it is healthy.

        Returns:
            Its `url`, SGLang's `version`, and the `pid` of its process group (None for a running server).
        """
        self._failure = asyncio.get_running_loop().create_future()
        if self._server is not None:
            self._client = await self._start_server(self._server)
        else:
            assert self.spec.url is not None
            self._client = Client(self.spec.name, self.spec.url, self.spec.key)

        await self._race_failure(self._wait_healthy(self._client))
        monitor = ProgressMonitor(self._client, self._progress, self._sampling, self.spec.stall_timeout_s)
        self._watchers.append(asyncio.create_task(self._watch(monitor.failure())))

        info = await self._race_failure(self._client.get("/server_info"))
        version = str(info.get("version", ""))
        if self._server is None:
            self._require_supported(version)
        if self.spec.serves_adapters:
            self._adapters = self._make_adapters(adapter_limit(self.spec.name, self._client.url, info))
        return {
            "url": self._client.url,
            "version": version,
            "pid": self._server and self._server.pid,
        }

    async def start_phase(self) -> EngineStart:
        """Return what `start` does now."""
        return EngineStart.warming_up if self._server is None else self._server.start_phase()

    async def stop(self) -> None:
        """Kill the server, unless it was running already, and close the client."""
        for watcher in self._watchers:
            watcher.cancel()
        if self._adapters is not None:
            self._adapters.close()
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()

    async def generate(self, request: GroupRequest) -> list[Completion]:
        """Sample the completions of one prompt. Waits while the engine drains or is paused."""
        client = self._started_client()
        abort_alls = self._abort_alls
        await self._race_failure(self._admitting.wait())
        if self._abort_alls != abort_alls:
            # Whoever asked for it may be gone, and ask again for the same prompt.
            raise EngineError(f"{self.spec.name}: prompt {request.name} was aborted before it was admitted")
        if request.name in self._in_flight:
            raise EngineError(f"{self.spec.name}: prompt {request.name} is in flight already")

        with self._adapter_for_request() as adapter:
            completions = await self._sample_in_flight(client, request, adapter)
        if self._tokenizer is None:
            return completions
        return await asyncio.to_thread(self._decoded, completions)

    async def pause(self, in_flight: InFlight) -> None:
        """Stop sampling. Later requests wait for `resume`: a paused engine may hold weights of two policies."""
        if self._paused:
            return
        self._pauses += 1

        if in_flight is InFlight.drain:
            self._admitting.clear()
            while self._in_flight:
                await self._race_failure(asyncio.sleep(IDLE_POLL_SECONDS))
            in_flight = InFlight.retract  # SGLang has no drain mode; nothing is left to retract

        if self._adapters is not None:
            self._adapters.pause()
        await self._control("/pause_generation", {"mode": in_flight.value})
        self._paused = True
        for group in self._in_flight.values():
            group.paused_in_place |= in_flight is InFlight.in_place

    async def resume(self) -> None:
        """Continue sampling."""
        if self._paused:
            await self._control("/continue_generation", {})
            self._paused = False
        if self._adapters is not None:
            self._adapters.resume()
        self._admitting.set()

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        """Abort the requests of these prompts, or all requests (None)."""
        named = None if prompt_ids is None else set(prompt_ids)
        groups = [group for group in self._in_flight.values() if named is None or group.prompt_id in named]
        if prompt_ids is not None:
            await self._abort_groups(groups)
            return

        for group in groups:
            group.abort_asked = True
        self._abort_alls += 1
        await self._control("/abort_request", {"abort_all": True, "rid": ""})

    async def release(self, region: EngineMemory) -> None:
        """Free a region's device memory; its content is lost. The engine must be paused and idle."""
        if self._in_flight or not self._paused:
            raise EngineError(
                f"{self.spec.name}: {region.name} cannot be released before the engine is paused and idle"
            )
        if self.spec.serves_adapters and region is EngineMemory.weights:
            raise EngineError(f"{self.spec.name}: weights cannot be released: no sync of adapters brings them back")
        # SGLang crashes when a region is released twice.
        if region not in self._released:
            if self.spec.releases_memory:
                await self._control("/release_memory_occupation", {"tags": [MEMORY_TAGS[region]]})
            self._released.add(region)

    async def reload(self, region: EngineMemory) -> None:
        """Allocate a released region again. The content of weights is undefined until the next sync."""
        if region in self._released:
            if self.spec.releases_memory:
                await self._control("/resume_memory_occupation", {"tags": [MEMORY_TAGS[region]]})
            self._released.discard(region)

    async def update(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Forward one request of a weight update to the server and return its reply."""
        return await self._race_failure(self._started_client().post(f"/{route}", body))

    async def load_adapter(self, version: int, body: Mapping[str, Any]) -> int:
        """Load the adapter of a policy version for every later request. Returns the adapters that are loaded now."""
        self._started_client()
        if self._adapters is None:
            raise EngineError(f"{self.spec.name} serves no adapters: model.lora.rank is 0")
        return await self._race_failure(self._adapters.load(version, body))

    async def stats(self) -> EngineStats:
        """Return the groups in flight and the completion tokens so far, as of the last report of the server."""
        running = sum(self._progress.tokens(group.request_ids) for group in self._in_flight.values())
        return EngineStats(len(self._in_flight), self._completion_tokens + running, self._progress.beats)

    async def memory(self) -> MemoryUse:
        """Return the memory of this process and of the server's processes."""
        servers = process_group_members(self._server.pid) if self._server else []
        return memory_use([os.getpid(), *servers])

    async def check(self) -> None:
        """Raise `EngineLost` if the server died or its scheduler does not answer. Works on a paused engine too."""
        if not await self._race_failure(self._started_client().healthy(SCHEDULER_ROUTE, CHECK_SECONDS)):
            self._fail(EngineLost(f"{self.spec.name} did not answer to {SCHEDULER_ROUTE} within {CHECK_SECONDS:.0f} s"))
        self._started_client()  # raises it

    # --- start

    async def _start_server(self, server: Server) -> Client:
        await server.start()
        self._watchers.append(asyncio.create_task(self._watch(server.died())))
        self._tokenizer = await asyncio.to_thread(
            load_tokenizer,
            Path(server.spec.model_path),
            trust_remote_code=bool(server.spec.flags.get("trust-remote-code")),
        )
        return Client(self.spec.name, url_of(server.spec.host, server.spec.port), server.spec.key)

    async def _wait_healthy(self, client: Client) -> None:
        deadline = asyncio.get_running_loop().time() + self.spec.start_timeout_s
        while not await client.healthy():
            if self._server and (address := self._server.refused_address()):
                raise EngineError(f"{self.spec.name}: another program listens at {address}{self._log_tail()}")
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(
                    f"{self.spec.name} at {client.url} did not become healthy within "
                    f"rollout.start_timeout_s={self.spec.start_timeout_s:.0f} s{self._log_tail()}"
                )
            await asyncio.sleep(HEALTH_POLL_SECONDS)

    def _log_tail(self) -> str:
        return f"; log: {self._server.spec.log}; its last lines:\n{self._server.tail()}" if self._server else ""

    def _require_supported(self, version: str) -> None:
        """Raise `EngineError` if the running server is too old. A version that cannot be read is accepted."""
        try:
            too_old = Version(version) < Version(OLDEST_SGLANG)
        except InvalidVersion:
            return
        if too_old:
            raise EngineError(
                f"{self.spec.name} at {self.spec.url} runs SGLang {version}: servers of rollout.urls must run SGLang "
                f"{OLDEST_SGLANG} or newer"
            )

    # --- calls

    def _started_client(self) -> Client:
        """Return the client, or raise the engine's failure."""
        if self._client is None or self._failure is None:
            raise EngineError(f"{self.spec.name} was not started")
        if self._failure.done():
            raise self._failure.result()
        return self._client

    async def _control(self, route: str, body: dict[str, Any]) -> None:
        """Make a call that the scheduler handles between two batches.

        Without a reply the engine is lost: it may or may not have done what was asked.
        """
        try:
            await self._race_failure(self._started_client().post(route, body, seconds=self.spec.stall_timeout_s))
        except (NoAnswer, ConnectionLost) as error:
            self._fail(EngineLost(f"{error} (rollout.stall_timeout_s)" if isinstance(error, NoAnswer) else str(error)))
            self._started_client()  # raises it

    async def _abort_groups(self, groups: Sequence[GroupInFlight]) -> None:
        for group in groups:
            group.abort_asked = True
        limit = asyncio.Semaphore(MAX_ABORT_CALLS)
        await gather_or_raise(*(self._abort(each, limit) for group in groups for each in group.request_ids))

    async def _abort(self, request_id: str, limit: asyncio.Semaphore) -> None:
        async with limit:
            await self._control("/abort_request", {"rid": request_id})

    def _make_adapters(self, limit: int) -> Adapters:
        async def post(route: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
            seconds = self.spec.stall_timeout_s
            return await self._race_failure(self._started_client().post(route, body, seconds=seconds))

        async def abort(adapter: Adapter) -> None:
            await self._abort_groups([group for group in self._in_flight.values() if group.adapter is adapter])

        seconds = self.spec.stall_timeout_s
        return Adapters(self.spec.name, self._host_id, limit=limit, abort_timeout_s=seconds, post=post, abort=abort)

    def _adapter_for_request(self) -> AbstractContextManager[Adapter | None]:
        if not self.spec.serves_adapters:
            return nullcontext()
        if self._adapters is None:
            raise EngineError(f"{self.spec.name} was not started")
        return self._adapters.for_request()

    def _request_ids(self, request: GroupRequest) -> list[str]:
        """Return one id per member, never used before: a server refuses ids of requests that were cancelled."""
        call = f"{self._host_id}-{next(self._calls)}"
        return [f"{call}/{request.name}#{member}" for member in range(request.group_size)]

    async def _sample_in_flight(
        self, client: Client, request: GroupRequest, adapter: Adapter | None
    ) -> list[Completion]:
        """Sample a group that counts as in flight meanwhile."""
        group = GroupInFlight(request.prompt_id, self._request_ids(request), adapter)
        self._in_flight[request.name] = group
        try:
            completions = await self._race_failure(self._sample(client, request, group))
        except BaseException:
            self._completion_tokens += self._progress.tokens(group.request_ids)
            raise
        finally:
            del self._in_flight[request.name]

        self._completion_tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    async def _sample(self, client: Client, request: GroupRequest, group: GroupInFlight) -> list[Completion]:
        """Sample a group. Raises `EngineError` if the server aborted a request by itself."""
        cache_key = f"{self._host_id}-{self._pauses}"
        adapter = group.adapter
        if adapter is not None:
            request = replace(request, version=adapter.version)
        replies = await client.generate(
            request, group.request_ids, cache_key=cache_key, adapter=adapter.name if adapter else None
        )
        reasons = [reply.abort_reason for reply in replies if reply.abort_reason is not None]
        if reasons and not group.abort_asked:
            raise EngineError(
                f"{self.spec.name} aborted {len(reasons)} of {len(replies)} completions of prompt {request.name} "
                f"by itself: {reasons[0]}"
            )
        completions = [reply.completion for reply in replies]
        if group.paused_in_place and adapter is None:
            return [replace(each, spans=spans_in_place(each.spans, request.version)) for each in completions]
        return completions

    def _decoded(self, completions: Sequence[Completion]) -> list[Completion]:
        texts = self._tokenizer.batch_decode([c.token_ids.tolist() for c in completions], skip_special_tokens=True)
        return [replace(completion, text=text) for completion, text in zip(completions, texts, strict=True)]

    # --- failures

    async def _race_failure(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, or raise the engine's failure if that comes first."""
        assert self._failure is not None
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        racers: list[asyncio.Future[Any]] = [task, self._failure]
        try:
            await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = task.done()
            if not finished:
                task.cancel()

        error = task.exception() if finished and not task.cancelled() else None
        if isinstance(error, ConnectionLost):
            if self._server:
                # Often the first sign of a crash. Wait for its error, which shows the exit code and the log.
                await asyncio.wait([self._failure], timeout=DEATH_SECONDS)
            else:
                # A server that comes back at this address may have other weights.
                self._fail(EngineLost(str(error)))

        if self._failure.done() and (not finished or error is not None):
            raise self._failure.result()
        return task.result()

    def _fail(self, error: EngineError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)

    async def _watch(self, failure: Coroutine[Any, Any, EngineError]) -> None:
        self._fail(await failure)

    def _sampling(self) -> dict[str, list[str]]:
        """Return SGLang's ids of the requests that the server should be sampling, by name; none while it is paused."""
        return {} if self._paused else {name: group.request_ids for name, group in self._in_flight.items()}

"""The connection of a host to its server: starts the process or uses a running one, and knows when it has failed."""

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from app.errors import EngineError, EngineLost
from app.rollout.engine.client import CALL_TIMEOUT_S, Client, ConnectionLost, NoAnswer
from app.rollout.engine.server import HOST, Server, ServerSpec, until_healthy
from app.types import EngineStart
from app.utils.process import process_group_members

CHECK_TIMEOUT_S = 10.0
OLDEST_SGLANG = "0.5.22"  # tests/device/test_versions.py runs it; without a GPU 0.5.21 does not start
SCHEDULER_ROUTE = "/server_info"  # answered by the scheduler; /health needs only the HTTP process
DEATH_TIMEOUT_S = 3.0  # from a lost connection until the operating system reports the server's death
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostSpec:
    """Settings of a host. It starts `server`, or uses the running server at `url` with `key`."""

    name: str  # "engine 0"
    start_timeout_s: float
    stall_timeout_s: float
    log: Path  # of the host; the server has its own
    update_timeout_s: float = CALL_TIMEOUT_S  # of a call that loads weights or adapters, or scores
    releases_memory: bool = False  # False: release and reload do nothing (there is no device memory on CPU)
    serves_adapters: bool = False  # True: every request names an adapter, and the weights of the model stay
    server: ServerSpec | None = None
    url: str | None = None
    tensor_parallel: int = 1  # that a sync to the server at `url` counts on
    key: str | None = field(default=None, repr=False)
    # Ray resource and visibility variable: `server` gets the devices that Ray gave to this actor, if it gave any.
    devices: tuple[str, str] | None = None


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


class ServerConnection:
    """The client of one server, and the failure that ended it.

    Invariants:
    - The first failure is final: every call that is waiting, and every later one, raises it.
    - A server at `spec.url` is never stopped, only disconnected from.

    Lifecycle: `start` once, then calls, any number concurrently, then `stop` once, in any state.
    """

    def __init__(self, spec: HostSpec):
        self._spec = spec
        self._server: Server | None = None
        if spec.server is not None:
            environment = {**spec.server.environment, **own_devices(spec.devices)}
            self._server = Server(replace(spec.server, environment=environment))

        self._client: Client | None = None
        self._failure: asyncio.Future[EngineError] | None = None
        self._watchers: list[asyncio.Task[None]] = []

    def client(self) -> Client:
        """Return the client. Raises the engine's failure, or `EngineError` before `start`."""
        if self._client is None or self._failure is None:
            raise EngineError(f"{self._spec.name} was not started")
        if self._failure.done():
            raise self._failure.result()
        return self._client

    @property
    def pid(self) -> int | None:
        """The process group of the server; None if this run did not start it."""
        return self._server.pid if self._server else None

    @property
    def start_phase(self) -> EngineStart:
        return EngineStart.warming_up if self._server is None else self._server.start_phase()

    @property
    def processes(self) -> list[int]:
        """The pids of the server; none if this run did not start it."""
        return process_group_members(self._server.pid) if self._server else []

    async def start(self) -> Mapping[str, Any]:
        """Start the server, or connect to the running one, and wait until it is healthy. Returns SGLang's info."""
        self._failure = asyncio.get_running_loop().create_future()
        if self._server is not None:
            await self._server.start()
            self.watch(self._server.died())
            server = self._server.spec
            self._client = Client(self._spec.name, f"http://{HOST}:{server.port}", server.key)
        else:
            assert self._spec.url is not None
            self._client = Client(self._spec.name, self._spec.url, self._spec.key)

        await self.race(until_healthy(self._client, self._server, self._spec.start_timeout_s))
        info: Mapping[str, Any] = await self.race(self._client.get(SCHEDULER_ROUTE))
        if self._server is None:
            version = str(info.get("version", ""))
            with suppress(InvalidVersion):  # one that cannot be read is accepted
                if Version(version) < Version(OLDEST_SGLANG):
                    raise EngineError(
                        f"{self._spec.name} at {self._spec.url} runs SGLang {version}: servers of rollout.urls must "
                        f"run SGLang {OLDEST_SGLANG} or newer"
                    )
            for name, value in {"tp_size": self._spec.tensor_parallel, "pp_size": 1, "dp_size": 1}.items():
                if (found := info.get(name, value)) != value:  # some ranks would keep their weights in a sync
                    expected = f"rollout.tensor_parallel={value}" if name == "tp_size" else str(value)
                    raise EngineError(f"{self._spec.name} at {self._spec.url} has {name}={found}, and not {expected}")
        return info

    async def stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()

    def watch(self, failure: Coroutine[Any, Any, EngineError]) -> None:
        """Wait for a failure in the background; it becomes the engine's."""

        async def wait() -> None:
            self.fail(await failure)

        self._watchers.append(asyncio.create_task(wait()))

    def fail(self, error: EngineError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)

    async def post(self, route: str, body: Mapping[str, Any], seconds: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Post a request and return the reply. `seconds` is its deadline."""
        return await self.race(self.client().post(route, body, seconds=seconds))

    async def control(self, route: str, body: Mapping[str, Any]) -> None:
        """Make a call that the scheduler handles between two batches.

        Without a reply the engine is lost: the server may or may not have done it.
        """
        try:
            await self.post(route, body, self._spec.stall_timeout_s)
        except (NoAnswer, ConnectionLost) as error:
            self.fail(EngineLost(f"{error} (rollout.stall_timeout_s)" if isinstance(error, NoAnswer) else str(error)))
            self.client()  # raises it

    async def check(self) -> None:
        """Raise `EngineLost` if the server died or its scheduler does not answer. Works on a paused engine too."""
        if not await self.race(self.client().healthy(SCHEDULER_ROUTE, CHECK_TIMEOUT_S)):
            late = f"within {CHECK_TIMEOUT_S:.0f} s"
            self.fail(EngineLost(f"{self._spec.name} did not answer to {SCHEDULER_ROUTE} {late}"))
        self.client()  # raises it

    async def race(self, work: Awaitable[T]) -> T:
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
                await asyncio.wait([self._failure], timeout=DEATH_TIMEOUT_S)
            else:
                # A server that comes back at this address may have other weights.
                self.fail(EngineLost(str(error)))

        if self._failure.done() and (not finished or error is not None):
            raise self._failure.result()
        return task.result()

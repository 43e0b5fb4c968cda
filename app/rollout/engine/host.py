"""The host of one engine: a Ray actor that owns the SGLang process and its HTTP client.

JSON is parsed here instead of in the driver, which serves all engines. If the server dies or stalls, or loses a
request, every request in flight fails with an error that names the engine.

    EngineHost ── ServerConnection   the process, its health, its failure
              ├── RequestsInFlight   admission, sampling, aborts
              └── Adapters           where adapters are served
"""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from app.errors import EngineError
from app.rollout.engine.requests_in_flight import RequestsInFlight
from app.rollout.engine.server_connection import HostSpec, ServerConnection
from app.rollout.progress import stall
from app.types import Completion, EngineMemory, EngineStart, EngineStats, GroupRequest, InFlight, MemoryUse
from app.utils.process import log_to, memory_use

if TYPE_CHECKING:
    from app.rollout.engine.served_adapters import Adapter, Adapters


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
        self._connection = ServerConnection(spec)
        self._requests = RequestsInFlight(spec.name, self._connection)
        self._adapters: Adapters | None = None  # until `start`, and where the model itself is trained
        self._paused: InFlight | None = None  # how; None: not paused
        self._released: set[EngineMemory] = set()
        self._resumes_with_memory = False  # `resume` was called before all of it was back

    async def start(self) -> dict[str, Any]:
        info = await self._connection.start()
        client = self._connection.client()
        if self.spec.url:  # an earlier run may have ended while it was paused
            await self._connection.control("/continue_generation", {})
        self._connection.watch(stall(client, self._requests.progress, self._sampling, self.spec.stall_timeout_s))
        if self.spec.serves_adapters:
            from app.rollout.engine.served_adapters import Adapters, adapter_limit

            self._adapters = Adapters(
                self.spec.name,
                self._requests.host_id,
                limit=adapter_limit(self.spec.name, client.url, info),
                abort_timeout_s=self.spec.stall_timeout_s,
                post=partial(self._connection.post, seconds=self.spec.update_timeout_s),
                abort=self._requests.abort_adapter,
            )
        return {"url": client.url, "version": str(info.get("version", "")), "pid": self._connection.pid}

    async def start_phase(self) -> EngineStart:
        return self._connection.start_phase

    async def stop(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
        await self._connection.stop()

    async def generate(self, request: GroupRequest) -> list[Completion]:
        self._connection.client()  # raises the failure
        await self._requests.admit(request)
        with self._adapter_for_request() as adapter:
            return await self._requests.sample(request, adapter)

    async def pause(self, in_flight: InFlight) -> None:
        self._resumes_with_memory = False
        if self._paused:
            return
        self._requests.begin_pause()

        if in_flight is InFlight.drain:
            await self._requests.drain()
            in_flight = InFlight.retract  # SGLang has no drain mode; nothing is left to retract

        if self._adapters is not None:
            self._adapters.pause()
        await self._connection.control("/pause_generation", {"mode": in_flight.value})
        self._paused = in_flight
        self._requests.paused(in_flight)

    async def resume(self) -> None:
        # A sync resumes engines whose caches are still released, and retracted requests would be computed at once.
        self._resumes_with_memory = bool(self._released)
        if self._resumes_with_memory:
            return
        if self._paused:
            await self._connection.control("/continue_generation", {})
            self._paused = None
        if self._adapters is not None:
            self._adapters.resume()
        self._requests.admit_again()

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        await self._requests.abort(prompt_ids)

    async def release(self, regions: Collection[EngineMemory]) -> None:
        # SGLang keeps the tokens of retracted requests while their KV cache is released.
        if self._paused is not InFlight.retract:
            raise EngineError(f"{self.spec.name}: memory is released after a pause with drain or retract only")
        if self.spec.serves_adapters and EngineMemory.weights in regions:
            raise EngineError(f"{self.spec.name}: weights cannot be released: no sync of adapters brings them back")
        # SGLang crashes when a region is released twice.
        await self._move_memory("/release_memory_occupation", {*regions} - self._released)
        self._released |= {*regions}

    async def reload(self, regions: Collection[EngineMemory]) -> None:
        await self._move_memory("/resume_memory_occupation", self._released & {*regions})
        self._released -= {*regions}
        if self._resumes_with_memory and not self._released:
            await self.resume()

    async def _move_memory(self, route: str, regions: Collection[EngineMemory]) -> None:
        if regions and self.spec.releases_memory:
            await self._connection.control(route, {"tags": [each.value for each in EngineMemory if each in regions]})

    async def update(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._connection.post(f"/{route}", body, self.spec.update_timeout_s)

    async def load_adapter(self, version: int, body: Mapping[str, Any]) -> int:
        self._connection.client()  # raises the failure
        if self._adapters is None:
            raise EngineError(f"{self.spec.name} serves no adapters: model.lora.rank is 0")
        return await self._connection.race(self._adapters.load(version, body))

    async def stats(self) -> EngineStats:
        return self._requests.stats

    async def memory(self) -> MemoryUse:
        return memory_use([os.getpid(), *self._connection.processes])

    async def check(self) -> None:
        await self._connection.check()

    def _adapter_for_request(self) -> "AbstractContextManager[Adapter | None]":
        if not self.spec.serves_adapters:
            return nullcontext()
        if self._adapters is None:
            raise EngineError(f"{self.spec.name} was not started")
        return self._adapters.for_request()

    def _sampling(self) -> dict[str, list[str]]:
        """Return SGLang's ids of the requests that the server should be sampling, by name; none while it is paused."""
        return {} if self._paused else self._requests.by_name

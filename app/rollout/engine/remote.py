"""The driver's proxy of an engine: `RolloutEngine` over the Ray actor that hosts it."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError

from app.errors import EngineError, EngineLost, RunError, one_line
from app.rollout.engine.host import EngineHost
from app.types import Completion, EngineMemory, EngineStart, EngineStats, GroupRequest, InFlight, MemoryUse
from app.utils.ray_calls import reply, run_error

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)
START_GRACE_S = 30.0  # for the actor to start and to report that its server did not
END_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 900.0  # of all other calls but generation and syncs, whose deadlines the host keeps


class NoReply(EngineLost):
    """The host did not return from a call within its deadline."""


@dataclass(eq=False)
class RemoteEngine:
    """Implements `RolloutEngine` (app/protocols.py) by forwarding every call to the host.

    Errors of the host, of its actor and of Ray become `EngineError` or `EngineLost` with the engine's name.
    """

    name: str
    actor: Any
    _ended: bool = False

    async def start(self, timeout_s: float) -> dict[str, Any]:
        seconds = timeout_s + START_GRACE_S
        try:
            return await self._call(seconds, EngineHost.start)
        except NoReply:
            raise EngineLost(
                f"{self.name}: Ray did not start its host, or the host did not reply, within "
                f"rollout.start_timeout_s={timeout_s:.0f} s and {START_GRACE_S:.0f} s more"
            ) from None

    async def start_phase(self) -> EngineStart:
        return await self._call(CALL_TIMEOUT_S, EngineHost.start_phase)

    async def stop(self) -> None:
        await self._call(END_TIMEOUT_S, EngineHost.stop)

    async def end(self) -> None:
        """Stop the server, then kill the host process, in any state."""
        if self._ended:
            return
        self._ended = True
        try:
            await self.stop()
        except RunError as error:
            log.warning("%s did not stop, killing its host: %s", self.name, one_line(error))
        ray.kill(self.actor)

    async def generate(self, request: GroupRequest) -> list[Completion]:
        return await self._call(None, EngineHost.generate, request)

    async def pause(self, in_flight: InFlight) -> None:
        await self._call(None if in_flight is InFlight.drain else CALL_TIMEOUT_S, EngineHost.pause, in_flight)

    async def resume(self) -> None:
        await self._call(CALL_TIMEOUT_S, EngineHost.resume)

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        await self._call(CALL_TIMEOUT_S, EngineHost.abort, prompt_ids)

    async def release(self, regions: Collection[EngineMemory]) -> None:
        await self._call(CALL_TIMEOUT_S, EngineHost.release, regions)

    async def reload(self, regions: Collection[EngineMemory]) -> None:
        await self._call(CALL_TIMEOUT_S, EngineHost.reload, regions)

    async def update(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call(None, EngineHost.update, route, body)

    async def load_adapter(self, version: int, body: Mapping[str, Any]) -> int:
        return await self._call(None, EngineHost.load_adapter, version, body)

    async def stats(self) -> EngineStats:
        return await self._call(CALL_TIMEOUT_S, EngineHost.stats)

    async def memory(self) -> MemoryUse:
        return await self._call(CALL_TIMEOUT_S, EngineHost.memory)

    async def check(self) -> None:
        await self._call(CHECK_TIMEOUT_S, EngineHost.check)

    async def _call(
        self,
        seconds: float | None,
        method: Callable[Concatenate[EngineHost, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the host. `seconds` is the deadline; None where the host keeps one."""
        name = method.__name__
        if method is EngineHost.update:
            name = f"update by {args[0]}"
        try:
            reference = getattr(self.actor, method.__name__).remote(*args, **kwargs)
            result: T = await asyncio.wait_for(reply(reference), seconds)
            return result
        except TimeoutError:
            raise NoReply(f"{self.name}: {name} did not return within {seconds:.0f} s") from None
        except RayError as error:
            failure = run_error(error, f"{self.name}: its host", name, failed=EngineError, lost=EngineLost)
            raise failure from failure.__cause__

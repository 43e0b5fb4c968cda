"""The driver's face of an engine: `RolloutEngine` over the Ray actor that hosts it."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from app.errors import EngineError, EngineLost, RunError
from app.types import Completion, EngineMemory, EngineStats, GroupRequest, InFlight, MemoryUse

log = logging.getLogger(__name__)
STOP_SECONDS = 10.0
CHECK_SECONDS = 30.0
CALL_SECONDS = 900.0  # for anything but generation, whose deadline is by progress and kept by the host


class RemoteEngine:
    """Every call is the host's own; errors come back as `EngineError` with the engine's name."""

    def __init__(self, name: str, actor: Any):
        self.name, self.actor = name, actor

    async def start(self, timeout_s: float) -> dict[str, Any]:
        return await self._call("start", seconds=timeout_s + 30)

    async def stop(self) -> None:
        await self._call("stop", seconds=30)

    async def end(self) -> None:
        """End the server and its host, whatever state they are in: politely first."""
        try:
            await asyncio.wait_for(self.stop(), STOP_SECONDS)
        except (RunError, TimeoutError) as error:
            log.warning("%s did not stop by itself: %s", self.name, error)
        ray.kill(self.actor)

    async def generate(self, request: GroupRequest) -> list[Completion]:
        return await self._call("generate", request, seconds=None)

    async def pause(self, in_flight: InFlight) -> None:
        await self._call("pause", in_flight, seconds=None if in_flight is InFlight.drain else CALL_SECONDS)

    async def resume(self) -> None:
        await self._call("resume")

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        await self._call("abort", prompt_ids)

    async def release(self, part: EngineMemory) -> None:
        await self._call("release", part)

    async def reload(self, part: EngineMemory) -> None:
        await self._call("reload", part)

    async def update(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._call("update", call, body)

    async def load(self) -> EngineStats:
        return await self._call("load")

    async def memory(self) -> MemoryUse:
        return await self._call("memory")

    async def check(self) -> None:
        await self._call("check", seconds=CHECK_SECONDS)

    async def _call(self, method: str, *arguments: Any, seconds: float | None = CALL_SECONDS) -> Any:
        try:
            return await asyncio.wait_for(_awaitable(getattr(self.actor, method).remote(*arguments)), seconds)
        except TimeoutError:
            raise EngineLost(f"{self.name}: {method} did not return within {seconds:.0f} s") from None
        except RayTaskError as error:
            if isinstance(error.cause, RunError):
                raise error.cause from None
            told = f"{type(error.cause).__name__}: {error.cause}".splitlines()[0]
            raise EngineError(f"{self.name}: {method} failed: {told}") from error
        except RayActorError as error:
            raise EngineLost(f"{self.name}: its host died during {method}: {str(error).splitlines()[0]}") from error


async def _awaitable(reference: Any) -> Any:
    return await reference

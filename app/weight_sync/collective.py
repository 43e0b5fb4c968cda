"""Push over a process group: trainer rank 0 broadcasts flattened buckets to every engine rank.

    driver        gather 0 | send 0, ask engines for 0, gather 1 | send 1, ask engines for 1, gather 2 | …
    trainer       ▓▓ gather ▓▓ ░ wire ░ (gather of the next bucket runs meanwhile)
    engine                     ░ wire ░ ▒ load ▒ → reply

The driver speaks HTTP to the engines: an update call receives one bucket, loads it, and replies. The broadcast is started
before the reply can come, so the two are raced: a refusal or a missing reply ends the broadcast by destroying the group.
The group is made once and reused. After a failure it is rebuilt by the next push, and no engine is resumed: it may hold
weights of two policies.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from app.errors import EngineError, RunError, SyncError
from app.protocols import RolloutEngine
from app.types import InFlight, SyncReport
from app.weight_sync.plan import Bucket, plan_buckets
from app.weight_sync.schema import WeightSyncConfig
from app.weight_sync.sender import Sender

log = logging.getLogger(__name__)
MIB = 1024 * 1024


class Ranks(Protocol):
    """What the driver needs of the trainer: parts on every rank."""

    async def attach(self, name: str, make: Any) -> None: ...

    async def call(self, part: str, method: str, /, **arguments: Any) -> list[Any]: ...

    async def source(self) -> tuple[str, int]:
        """Address of rank 0 and a free port there."""
        ...


class CollectiveSync:
    """Implements `WeightSync` (app/protocols.py)."""

    def __init__(
        self,
        ranks: Ranks,
        engines: Sequence[RolloutEngine],
        config: WeightSyncConfig,
        *,
        backend: str,
        tensor_parallel: int,
        in_flight: InFlight,
    ):
        self.ranks, self.engines, self.config = ranks, list(engines), config
        self.backend, self.tensor_parallel, self.in_flight = backend, tensor_parallel, in_flight
        self._buckets: Sequence[Bucket] = ()
        self._name: str | None = None  # of the group in use
        self._sessions: bool | None = None  # whether the servers have begin/end sessions; None: not asked yet

    async def prepare(self) -> None:
        """Attach the senders and cut the plan; once, when the trainer has loaded its model."""
        await self.ranks.attach("sync", Sender)
        tensors = (await self.ranks.call("sync", "describe"))[0]
        self._buckets = plan_buckets(tensors, capacity=int(self.config.bucket_mib * MIB))
        await self.ranks.call("sync", "prepare", buckets=self._buckets)

    async def push(self, version: int) -> SyncReport:
        """Carry the trainer's parameters into every engine as policy `version`."""
        clock = Clock()
        reused = self._name is not None
        try:
            await self._each("pause", lambda engine: engine.pause(self.in_flight))
            clock.mark("pause")
            if self._name is None:
                await self._connect()
                clock.mark("connect")
            await self._transfer(version, clock)
            await self._each("resume", lambda engine: engine.resume())
            clock.mark("resume")
        except BaseException:
            await self._give_up()
            raise
        return SyncReport(
            version=version,
            bytes=sum(bucket.bytes for bucket in self._buckets),
            buckets=len(self._buckets),
            seconds=clock.total(),
            group_reused=reused,
        )

    async def _connect(self) -> None:
        """Both sides of the group are started together and awaited together."""
        address, port = await self.ranks.source()
        name = f"weight_update_{secrets.token_hex(4)}"
        world = 1 + len(self.engines) * self.tensor_parallel
        shown = f"[{address}]" if ":" in address else address
        sender = self.ranks.call(
            "sync",
            "connect",
            backend=self.backend,
            url=f"tcp://{shown}:{port}",
            world_size=world,
            name=name,
            timeout_s=self.config.timeout_s,
        )
        receivers = [
            engine.update(
                "init_weights_update_group",
                {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": 1 + index * self.tensor_parallel,
                    "world_size": world,
                    "group_name": name,
                    "backend": self.backend,
                },
            )
            for index, engine in enumerate(self.engines)
        ]
        await self._together("building the process group", sender, *receivers)
        self._name = name

    async def _transfer(self, version: int, clock: "Clock") -> None:
        await self._begin_session()
        await self.ranks.call("sync", "gather", index=0)
        clock.mark("gather")
        for index, bucket in enumerate(self._buckets):
            await self.ranks.call("sync", "send", index=index)
            last = index + 1 == len(self._buckets)
            work: list[Coroutine[Any, Any, Any]] = [
                self._receive(engine, bucket, version, last) for engine in self.engines
            ]
            if not last:
                work.append(self.ranks.call("sync", "gather", index=index + 1))
            await self._together(f"bucket {index} of {len(self._buckets)}", *work)
            await self.ranks.call("sync", "sent", index=index, timeout_s=self.config.timeout_s)
        clock.mark("load")
        if self._sessions:
            await self._each("end", lambda engine: engine.update("end_weight_update", {}))
        clock.mark("end")

    async def _receive(self, engine: RolloutEngine, bucket: Bucket, version: int, last: bool) -> None:
        await engine.update(
            "update_weights_from_distributed",
            {
                "names": [tensor.name for tensor in bucket.tensors],
                "dtypes": [tensor.dtype for tensor in bucket.tensors],
                "shapes": [list(tensor.shape) for tensor in bucket.tensors],
                "group_name": self._name,
                "load_format": "flattened_bucket",
                "flush_cache": last and self.in_flight is not InFlight.in_place,
                "weight_version": str(version),
            },
        )

    async def _begin_session(self) -> None:
        """Servers since 0.5.21 take updates in sessions only; older ones have no such route (404)."""
        if self._sessions is False:
            return
        try:
            await self._each("begin", lambda engine: engine.update("begin_weight_update", {}))
            self._sessions = True
        except EngineError as error:
            if self._sessions is None and "HTTP 404" in str(error):
                self._sessions = False
            else:
                raise

    async def _each(self, phase: str, call: Any) -> None:
        await self._together(phase, *(call(engine) for engine in self.engines))

    async def _together(self, phase: str, *work: Coroutine[Any, Any, Any]) -> None:
        """All of them, within the deadline; the first failure ends the wait."""
        tasks = [asyncio.ensure_future(each) for each in work]
        done, waiting = await asyncio.wait(tasks, timeout=self.config.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task.exception() for task in done if task.exception()), None)
        for task in waiting:
            task.cancel()
        if failed is not None:
            raise SyncError(f"push failed at {phase}: {failed}") from failed
        if waiting:
            who = [
                getattr(self.engines[i], "name", f"engine {i}")
                for i, task in enumerate(tasks[: len(self.engines)])
                if task in waiting
            ]
            raise SyncError(
                f"push did not pass {phase} within weight_sync.timeout_s={self.config.timeout_s:.0f} s; "
                f"waiting for {', '.join(who) or 'trainer ranks'}"
            )

    async def _give_up(self) -> None:
        """Leave the group on both sides, so that the next push builds a new one."""
        name, self._name = self._name, None
        if name is None:
            return
        leaving = [self.ranks.call("sync", "disconnect")]
        leaving += [engine.update("destroy_weights_update_group", {"group_name": name}) for engine in self.engines]  # type: ignore[misc]
        outcomes = await asyncio.gather(*leaving, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, RunError):
                log.warning("after the failed push: %s", outcome)


class Clock:
    """Seconds of the phases of a push."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] = now - self._last
        self._last = now

    def total(self) -> dict[str, float]:
        return {**self._seconds, "total": time.perf_counter() - self._started}

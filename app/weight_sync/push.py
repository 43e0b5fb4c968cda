"""A push: the trainer's parameters into every engine, over whichever transport.

    gather 0 → pause → begin → [ask for k ‖ gather k + 1] … → end → (verify) → resume

Always holds: an engine is paused from before its first changed byte until its last one is in, and after a failure it
stays paused, since it may hold weights of two policies; the next push tears down what the failed one left, and sends
everything again. The version is stamped with the last bucket. The order of phases is slime's, the strict request and
reply per bucket twinkle's, the race of broadcast and reply follows from SGLang's API.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from app.errors import EngineError, SyncError
from app.protocols import RolloutEngine
from app.types import InFlight, SyncReport
from app.weight_sync.plan import Bucket, plan_buckets
from app.weight_sync.schema import WeightSyncConfig
from app.weight_sync.transport import RANKS, SENDER, Carrier, Ranks, name_of
from app.weight_sync.verify import Verifier
from app.weight_sync.waits import Waits, give_up_on

log = logging.getLogger(__name__)
MIB = 1024 * 1024
CLOSE_SECONDS = 3.0
OPEN_ALREADY = "already open"  # what a server says of a session that a failed push left


class Push:
    """Implements `WeightSync` (app/protocols.py)."""

    def __init__(
        self,
        ranks: Ranks,
        engines: Sequence[RolloutEngine],
        config: WeightSyncConfig,
        carrier: Carrier,
        verifier: Verifier,
        *,
        in_flight: InFlight,
    ):
        self.ranks, self.config = ranks, config
        self.engines = dict(enumerate(engines))  # by place, which says whose card an engine stands on
        self.carrier, self.verifier, self.in_flight = carrier, verifier, in_flight
        self._buckets: Sequence[Bucket] = ()
        self._without_sessions: set[str] = set()  # engines of SGLang 0.5.20 and older
        self._stale = False  # whether the carrier's way leads to other members

    async def prepare(self) -> None:
        """Attach the senders and cut the plan; once, when the trainer has loaded its model."""
        await self.ranks.attach(SENDER, self.carrier.sender)
        tensors = (await self.ranks.call(SENDER, "describe"))[0]
        self._buckets = plan_buckets(tensors, capacity=int(self.config.bucket_mib * MIB))
        await self.ranks.call(SENDER, "prepare", buckets=self._buckets)

    def change_engines(self, engines: Mapping[int, RolloutEngine]) -> None:
        """Push to these, by their places, from now on; the next push builds the way anew if they are others."""
        if self.engines == dict(engines):
            return
        self.engines = dict(engines)
        self._without_sessions.clear()
        self._stale = True

    async def close(self) -> None:
        """Free what the ranks hold: shared memory outlives a process that is killed."""
        await give_up_on({RANKS: self.ranks.call(SENDER, "close")}, CLOSE_SECONDS)

    async def push(self, version: int) -> SyncReport:
        """Carry the trainer's parameters into every engine as policy `version`. Raises `SyncError`."""
        waits, clock = Waits(version, self.config.timeout_s), Clock()
        try:
            if self._stale:
                await self.carrier.abandon(self.ranks)
                self._stale = False
            offered = (await waits.all_of("gathering bucket 0", {RANKS: self.ranks.call(SENDER, "first")}))[RANKS]
            clock.mark("gather")
            await waits.all_of("pause", self._each(self._pause), deadline=False)  # each has its own
            clock.mark("pause")
            reused = await self.carrier.connect(waits, self.ranks, self._members)
            clock.mark("connect")
            await self._load(waits, offered)
            clock.mark("load")
            await self.verifier.after(waits, self.ranks, self._members, flush=self._flush)
            clock.mark("verify")
            await waits.all_of("resume", self._each(lambda engine, _: engine.resume()))
            clock.mark("resume")
        except BaseException:
            await self.carrier.abandon(self.ranks)
            raise
        return SyncReport(
            version=version,
            bytes=sum(bucket.bytes for bucket in self._buckets),
            buckets=len(self._buckets),
            seconds=clock.total(),
            group_reused=reused,
        )

    async def abandon(self) -> None:
        """Tear the way down on both sides: the ranks, or some of them, are gone."""
        await self.carrier.abandon(self.ranks)

    @property
    def _members(self) -> list[RolloutEngine]:
        return list(self.engines.values())

    async def _load(self, waits: Waits, offered: Sequence[Any]) -> None:
        """Every bucket into every engine, the next one being gathered meanwhile."""
        await waits.all_of("begin", self._each(self._begin))
        count = len(self._buckets)
        for index, bucket in enumerate(self._buckets):
            last = index + 1 == count
            stamp = {"weight_version": str(waits.version) if last else None, "flush_cache": last and self._flush}
            answers = await waits.all_of(
                f"bucket {index} of {count}",
                {
                    RANKS: self.ranks.call(SENDER, "advance", index=index),
                    **{
                        name_of(engine, place): engine.update(
                            self.carrier.route, {**self.carrier.ask(place, bucket, offered), **stamp}
                        )
                        for place, engine in self.engines.items()
                    },
                },
            )
            offered = answers[RANKS]
        await waits.all_of(
            "end", {RANKS: self.ranks.call(SENDER, "finish", timeout_s=waits.timeout_s), **self._each(self._end)}
        )

    @property
    def _flush(self) -> bool:
        """Whether what was cached under the old weights is thrown away."""
        return self.in_flight is not InFlight.in_place

    async def _pause(self, engine: RolloutEngine, place: int) -> None:
        """A drain may take longer than a push may wait: while groups are in flight, the engine's host watches them."""
        seconds = self.config.timeout_s
        pausing = asyncio.ensure_future(engine.pause(self.in_flight))
        try:
            while not (await asyncio.wait({pausing}, timeout=seconds))[0]:
                if self.in_flight is not InFlight.drain or not (await engine.load()).groups:
                    raise SyncError(f"{name_of(engine, place)}: no answer within weight_sync.timeout_s={seconds:g} s")
            pausing.result()
        finally:
            pausing.cancel()

    async def _begin(self, engine: RolloutEngine, place: int) -> None:
        """Servers since 0.5.21 take updates in sessions only; older ones have no such route (404)."""
        name = name_of(engine, place)
        if name in self._without_sessions:
            return
        try:
            await engine.update("begin_weight_update", {})
        except EngineError as error:
            if "HTTP 404" in str(error):
                log.info("%s has no update sessions (SGLang before 0.5.21)", name)
                self._without_sessions.add(name)
            elif OPEN_ALREADY in str(error):
                await engine.update("end_weight_update", {})
                await engine.update("begin_weight_update", {})
            else:
                raise

    async def _end(self, engine: RolloutEngine, place: int) -> None:
        if name_of(engine, place) not in self._without_sessions:
            await engine.update("end_weight_update", {})

    def _each(
        self, call: Callable[[RolloutEngine, int], Coroutine[Any, Any, Any]]
    ) -> dict[str, Coroutine[Any, Any, Any]]:
        return {name_of(engine, place): call(engine, place) for place, engine in self.engines.items()}


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

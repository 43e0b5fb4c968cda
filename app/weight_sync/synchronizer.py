"""A push: the trainer's parameters into every engine, over whichever transport.

    gather 0 → pause → begin → [ask for k ‖ gather k + 1] … → end → (verify) → resume

Always holds: an engine is paused from before its first changed byte until its last one is in, and after a failure it
stays paused, since it may hold weights of two policies; the next push tears down what the failed one left, and sends
everything again: a delta (weight_sync.mode) is only pushed onto what all engines are known to hold. The version is
stamped with the last bucket. The order of phases is slime's, the strict request and reply per bucket twinkle's, the
race of broadcast and reply follows from SGLang's API.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import prod
from typing import Any

from app.config.weight_sync import SyncMode, WeightSyncConfig
from app.errors import EngineError, SyncError
from app.protocols import RolloutEngine
from app.types import InFlight, SyncReport
from app.weight_sync.buckets import Bucket, ReadyBucket, plan_buckets
from app.weight_sync.deadlines import Deadline, best_effort
from app.weight_sync.sender import Sender
from app.weight_sync.transport.base import RANKS, SENDER, TrainerGroup, Transport, name_of
from app.weight_sync.verify import Verifier

log = logging.getLogger(__name__)
MIB = 1024 * 1024
CLOSE_SECONDS = 3.0
OPEN_ALREADY = "already open"  # what a server says of a session that a failed push left


class BucketedWeightSynchronizer:
    """Implements `WeightSynchronizer` (app/protocols.py)."""

    def __init__(
        self,
        ranks: TrainerGroup,
        engines: Sequence[RolloutEngine],
        config: WeightSyncConfig,
        carrier: Transport,
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
        self._held: int | None = None  # the version that all engines hold whole; None: some may not
        self._since_full = 0  # pushes

    async def prepare(self) -> None:
        """Attach the senders and cut the plan; whenever a trainer has loaded its model. The next push is a full one."""
        self._held = None
        await self.ranks.attach(SENDER, self.carrier.sender)
        tensors = (await self.ranks.call(SENDER, Sender.describe))[0]
        self._buckets = plan_buckets(tensors, capacity=int(self.config.bucket_mib * MIB))
        snapshot = self.config.snapshot if self.config.mode is SyncMode.delta else None
        await self.ranks.call(SENDER, Sender.prepare, buckets=self._buckets, snapshot=snapshot)

    def set_engines(self, engines: Mapping[int, RolloutEngine]) -> None:
        """Push to these, by their places, from now on; the next push builds the way anew if they are others."""
        if self.engines == dict(engines):
            return
        self.engines = dict(engines)
        self._without_sessions.clear()
        self._stale, self._held = True, None

    async def close(self) -> None:
        """Free what the ranks hold: shared memory outlives a process that is killed."""
        await best_effort({RANKS: self.ranks.call(SENDER, Sender.close)}, CLOSE_SECONDS)

    async def sync(self, version: int) -> SyncReport:
        """Carry the trainer's parameters into every engine as policy `version`. Raises `SyncError`."""
        waits, clock, base = Deadline(version, self.config.timeout_s), Clock(), self._base()
        self._held = None  # until all of it is there
        try:
            if self._stale:
                await self.carrier.abandon(self.ranks)
                self._stale = False
            gathering = {RANKS: self.ranks.call(SENDER, Sender.first, version=version, base=base)}
            offered = (await waits.gather("gathering bucket 0", gathering))[RANKS]
            clock.mark("gather")
            await waits.gather("pause", self._each(self._pause), deadline=False)  # each has its own
            clock.mark("pause")
            reused = await self.carrier.connect(waits, self.ranks, self._members)
            clock.mark("connect")
            sent = await self._load(waits, offered)
            clock.mark("load")
            await self.verifier.after(waits, self.ranks, self._members, flush=self._flush)
            clock.mark("verify")
            await waits.gather("resume", self._each(lambda engine, _: engine.resume()))
            clock.mark("resume")
        except BaseException:
            await self.carrier.abandon(self.ranks)
            raise
        self._held, self._since_full = version, 0 if base is None else self._since_full + 1
        changed = [offer.changed for offer in sent if offer.changed is not None]
        return SyncReport(
            version=version,
            bytes=sum(offer.bucket.bytes for offer in sent),
            buckets=len(self._buckets),
            seconds=clock.total(),
            group_reused=reused,
            bytes_full=sum(bucket.bytes for bucket in self._buckets),
            changed_fraction=sum(changed) / self._elements if changed else None,
        )

    async def abort(self) -> None:
        """Tear the way down on both sides: the ranks, or some of them, are gone."""
        await self.carrier.abandon(self.ranks)

    @property
    def _members(self) -> list[RolloutEngine]:
        return list(self.engines.values())

    def _base(self) -> int | None:
        """What a push may be a delta onto; None: it has to be full."""
        every = self.config.full_every
        due = every > 0 and self._since_full + 1 >= every
        return None if self.config.mode is SyncMode.full or due else self._held

    @property
    def _elements(self) -> int:
        return sum(prod(tensor.shape) for bucket in self._buckets for tensor in bucket.tensors)

    async def _load(self, waits: Deadline, offered: Sequence[ReadyBucket]) -> list[ReadyBucket]:
        """Every bucket into every engine, the next one gathered meanwhile; returns what trainer rank 0 offered."""
        await waits.gather("begin", self._each(self._begin))
        count, sent = len(self._buckets), list[ReadyBucket]()
        for index in range(count):
            sent.append(offered[0])
            last = index + 1 == count
            stamp = {"weight_version": str(waits.version) if last else None, "flush_cache": last and self._flush}
            answers = await waits.gather(
                f"bucket {index} of {count}",
                {
                    RANKS: self.ranks.call(SENDER, Sender.advance, index=index),
                    **{
                        name_of(engine, place): engine.update(
                            self.carrier.route, {**self.carrier.ask(place, offered), **stamp}
                        )
                        for place, engine in self.engines.items()
                    },
                },
            )
            self._expect_reply(waits, index, offered[0].reply, answers)
            offered = answers[RANKS]
        await waits.gather(
            "end", {RANKS: self.ranks.call(SENDER, Sender.finish, timeout_s=waits.timeout_s), **self._each(self._end)}
        )
        return sent

    def _expect_reply(self, waits: Deadline, index: int, reply: str | None, answers: Mapping[str, Any]) -> None:
        """SGLang alone answers a message of a delta push with success, and skips what it does not know."""
        for place, engine in self.engines.items():
            name = name_of(engine, place)
            said = answers[name].get("message", "")
            if reply is not None and not said.startswith(reply):  # SGLang adds the version that it noted
                raise SyncError(
                    f"push of policy {waits.version} failed at bucket {index}: {name} answered {said!r} instead of "
                    f"{reply!r}: weight_sync.mode=delta needs SGLang 0.5.21 or newer with this package's plugin in it; "
                    "weight_sync.mode=full does not"
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
                if self.in_flight is not InFlight.drain or not (await engine.stats()).groups:
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

"""The weight synchronizer: copies the trainer's parameters into every engine, over any transport.

    gather bucket 0 → pause → connect → [load bucket k ‖ gather bucket k + 1] … → verify → resume

Invariants:
    - An engine is paused from before its first changed byte until its last bucket is loaded.
    - After a failure the engines stay paused, since they may hold weights of two policies. The next sync reconnects
      from scratch and sends all weights.
    - A delta (`weight_sync.mode`) is only sent onto a version that every engine is known to hold.
    - The last bucket stamps the version.

The order of the phases is slime's; one request and one reply per bucket is twinkle's. SGLang's API requires awaiting
broadcast and reply together.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from app.config import RunConfig
from app.config.weight_sync import SyncMode, TransportKind, WeightSyncConfig, transport_of
from app.device import Device
from app.errors import EngineError, SyncError
from app.protocols import RolloutEngine
from app.trainer.remote import RemoteTrainer
from app.types import SYNC_PHASES, InFlight, SyncReport
from app.utils.phase_timer import PhaseTimer
from app.utils.units import MIB
from app.weight_sync.buckets import Bucket, ReadyBucket, plan_buckets
from app.weight_sync.sender import Sender
from app.weight_sync.transport.base import SENDER_EXTENSION, TRAINER_RANKS, Deadline, Transport, best_effort
from app.weight_sync.transport.collective import CollectiveTransport
from app.weight_sync.transport.ipc import IpcTransport
from app.weight_sync.verify import Verifier

if TYPE_CHECKING:
    from app.weight_sync.adapters import AdapterSynchronizer

    Synchronizer: TypeAlias = "BucketedWeightSynchronizer | AdapterSynchronizer"

CLOSE_TIMEOUT_S = 3.0
TARGET = {"selector": "target"}  # by default SGLang offers a policy's weights to the loader of its draft as well
SESSION_OPEN = "already open"  # in the server's error about a session that a failed sync left open


@dataclass(eq=False)
class BucketedWeightSynchronizer:
    """Implements `WeightSynchronizer` (app/protocols.py).

    Lifecycle: `prepare` whenever a trainer has loaded its model → `sync`, with `set_engines` in between → `abort` when
    trainer ranks were lost, and again `prepare` → `close` once.
    """

    trainer: RemoteTrainer
    engines: dict[int, RolloutEngine]  # by engine index, which determines an engine's devices
    config: WeightSyncConfig
    transport: Transport
    verifier: Verifier
    in_flight: InFlight
    tensor_parallel: int  # ranks of an engine
    bucket_bytes: int  # capacity of a bucket
    _buckets: Sequence[Bucket] = ()
    _members_changed: bool = False  # since the transport connected
    _synced_version: int | None = None  # that every engine is known to hold

    async def prepare(self) -> None:
        """Attach the senders and plan the buckets. The next sync is full."""
        self._synced_version = None
        await self.trainer.attach(SENDER_EXTENSION, self.transport.sender)
        tensors = (await self.trainer.call(SENDER_EXTENSION, Sender.describe))[0]
        self._buckets = plan_buckets(tensors, capacity=self.bucket_bytes)
        snapshot = self.config.snapshot if self.config.mode is SyncMode.delta else None
        await self.trainer.call(SENDER_EXTENSION, Sender.prepare, self._buckets, snapshot, self.tensor_parallel)

    def set_engines(self, engines: Mapping[int, RolloutEngine]) -> None:
        """Sync to these engines, by engine index. If they changed, the next sync reconnects and is full."""
        if self.engines == dict(engines):
            return
        self.engines = dict(engines)
        self._members_changed = True
        self._synced_version = None

    async def sync(self, version: int) -> SyncReport:
        """Copy the trainer's parameters into every engine as policy `version`. See `WeightSynchronizer.sync`."""
        deadline = Deadline(version, self.config.timeout_s)
        started, timer = time.perf_counter(), PhaseTimer()
        # The version that a delta is onto; None: a full sync.
        base = None if self.config.mode is SyncMode.full else self._synced_version
        self._synced_version = None  # until every engine has all of it
        try:
            with timer.phase("gather"):
                if self._members_changed:
                    await self.transport.abort(self.trainer)
                    self._members_changed = False
                engines = list(self.engines)
                begin = self.trainer.call(SENDER_EXTENSION, Sender.begin, version=version, base=base, engines=engines)
                ready = (await deadline.gather("gathering bucket 0", {TRAINER_RANKS: begin}))[TRAINER_RANKS]
            with timer.phase("pause"):
                await deadline.gather("pause", self._on_engines(self._pause), bounded=False)
            with timer.phase("connect"):
                reused = await self.transport.connect(deadline, self.trainer, self._members)
            with timer.phase("load"):
                sent = await self._load(deadline, ready)
            with timer.phase("verify"):
                await self.verifier.after_sync(deadline, self.trainer, self._members, flush_cache=self._flush_cache)
            with timer.phase("resume"):
                await deadline.gather("resume", self._on_engines(lambda engine: engine.resume()))
        except BaseException:
            await self.transport.abort(self.trainer)
            raise

        self._synced_version = version
        return self._report(version, sent, sync_seconds(timer, started), reused)

    async def abort(self) -> None:
        await self.transport.abort(self.trainer)

    async def close(self) -> None:
        """Free the senders' memory. Shared memory would outlive a killed process."""
        closing = self.trainer.call(SENDER_EXTENSION, Sender.close)
        await best_effort({TRAINER_RANKS: closing}, CLOSE_TIMEOUT_S)

    # --- the steps of a sync

    async def _pause(self, engine: RolloutEngine) -> None:
        """Pause one engine. A drain may exceed `timeout_s`: while groups are in flight, their own deadlines apply."""
        timeout_s = self.config.timeout_s
        pausing = asyncio.ensure_future(engine.pause(self.in_flight))
        try:
            while True:
                done, _ = await asyncio.wait({pausing}, timeout=timeout_s)
                if done:
                    pausing.result()
                    return
                draining = self.in_flight is InFlight.drain and (await engine.stats()).groups
                if not draining:
                    raise SyncError(f"{engine.name}: no reply within weight_sync.timeout_s={timeout_s:g} s")
        finally:
            pausing.cancel()

    async def _load(self, deadline: Deadline, ready: list[ReadyBucket]) -> list[ReadyBucket]:
        """Load every bucket into every engine and gather the next one meanwhile; return trainer rank 0's buckets."""
        await deadline.gather("begin_weight_update", self._on_engines(self._begin_update))

        sent: list[ReadyBucket] = []
        for index in range(len(self._buckets)):
            sent.append(ready[0])
            calls = self._bucket_calls(deadline.version, index, ready)
            replies = await deadline.gather(f"bucket {index} of {len(self._buckets)}", calls)
            self._check_replies(deadline.version, index, ready[0].expected_reply, replies)
            ready = replies[TRAINER_RANKS]

        calls = self._on_engines(lambda engine: engine.update("end_weight_update", {}))
        calls[TRAINER_RANKS] = self.trainer.call(SENDER_EXTENSION, Sender.finish, timeout_s=deadline.timeout_s)
        await deadline.gather("end_weight_update", calls)
        return sent

    def _bucket_calls(
        self, version: int, index: int, ready: Sequence[ReadyBucket]
    ) -> dict[str, Coroutine[Any, Any, Any]]:
        last = index + 1 == len(self._buckets)
        calls: dict[str, Coroutine[Any, Any, Any]] = {}
        calls[TRAINER_RANKS] = self.trainer.call(SENDER_EXTENSION, Sender.send_and_gather_next, index=index)
        for engine_index, engine in self.engines.items():
            body = self.transport.request_body(engine_index, ready)
            body["weight_version"] = str(version) if last else None
            body["flush_cache"] = last and self._flush_cache
            body |= TARGET
            calls[engine.name] = engine.update(self.transport.route, body)
        return calls

    def _check_replies(self, version: int, index: int, expected: str | None, replies: Mapping[str, Any]) -> None:
        """Raise `SyncError` if an engine ignored a delta. SGLang without our plugin skips it and reports success."""
        if expected is None:
            return
        for engine in self._members:
            reply = replies[engine.name].get("message", "")
            # SGLang appends the version that it recorded
            if not reply.startswith(expected):
                raise SyncError(
                    f"weight sync of policy {version} failed at bucket {index}: {engine.name} replied {reply!r} "
                    f"instead of {expected!r}: weight_sync.mode=delta needs this package's plugin installed beside "
                    "SGLang; weight_sync.mode=full does not"
                )

    async def _begin_update(self, engine: RolloutEngine) -> None:
        # SGLang keeps the session of a failed sync open, and refuses a second one.
        try:
            await engine.update("begin_weight_update", TARGET)
        except EngineError as error:
            if SESSION_OPEN not in str(error):
                raise
            await engine.update("end_weight_update", {})
            await engine.update("begin_weight_update", TARGET)

    # --- state of a sync

    @property
    def _members(self) -> list[RolloutEngine]:
        return list(self.engines.values())

    @property
    def _flush_cache(self) -> bool:
        return self.in_flight is not InFlight.in_place

    def _on_engines(
        self, call: Callable[[RolloutEngine], Coroutine[Any, Any, Any]]
    ) -> dict[str, Coroutine[Any, Any, Any]]:
        return {engine.name: call(engine) for engine in self._members}

    def _report(self, version: int, sent: Sequence[ReadyBucket], seconds: dict[str, float], reused: bool) -> SyncReport:
        elements = sum(prod(tensor.shape) for bucket in self._buckets for tensor in bucket.tensors)
        changed = [ready.changed for ready in sent if ready.changed is not None]
        return SyncReport(
            version=version,
            bytes=sum(ready.bucket.bytes for ready in sent),
            buckets=len(self._buckets),
            seconds=seconds,
            group_reused=reused,
            bytes_full=sum(bucket.bytes for bucket in self._buckets),
            changed_fraction=sum(changed) / elements if changed else None,
        )


def sync_seconds(timer: PhaseTimer, started: float) -> dict[str, float]:
    """Return the seconds of each phase of a sync, and of all of them as `total`, since `started`."""
    return {**dict.fromkeys(SYNC_PHASES, 0.0), **timer.seconds(), "total": time.perf_counter() - started}


def make_synchronizer(
    config: RunConfig,
    device: Device,
    trainer: RemoteTrainer,
    engines: Sequence[RolloutEngine],
    folder: Path,
    *,
    one_machine: bool,
) -> "Synchronizer":
    """Create the synchronizer of a run in `folder`, not prepared yet.

    `one_machine`: whether trainer ranks and engines share a machine, and with it the shared memory of its processes.
    """
    tensor_parallel = config.rollout.tensor_parallel
    indexed = dict(enumerate(engines))
    if config.model.lora.enabled:
        from app.weight_sync.adapters import AdapterSynchronizer

        one_machine = one_machine and not config.rollout.urls
        return AdapterSynchronizer(trainer, indexed, config.weight_sync, tensor_parallel, one_machine)

    kind = transport_of(config.weight_sync, shared_devices=config.shared_devices, device=device.kind)
    transport: Transport = IpcTransport(tensor_parallel)
    if kind is TransportKind.collective:
        transport = CollectiveTransport(device.collective, tensor_parallel)

    verifier = Verifier(config.weight_sync.verify, folder / "verify")
    capacity = int((config.weight_sync.bucket_mib or device.bucket_mib) * MIB)
    in_flight = config.placement.in_flight_or_default()
    return BucketedWeightSynchronizer(
        trainer, indexed, config.weight_sync, transport, verifier, in_flight, tensor_parallel, capacity
    )

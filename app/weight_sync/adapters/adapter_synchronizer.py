"""The weight synchronizer of LoRA: gives every engine the adapter of a policy version, beside those in use.

    gather on the trainer → every engine loads it → later requests are sampled with it

Invariants:
    - No engine is paused, and nothing in flight changes its policy: a request ends with the adapter it began with.
    - The base is never sent: the engines loaded it from the same directory as the trainer.
    - A failed sync leaves every engine with a complete adapter of this policy or of an earlier one.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from app.config.weight_sync import WeightSyncConfig
from app.errors import SyncError
from app.protocols import RolloutEngine
from app.trainer.remote import RemoteTrainer
from app.types import SyncReport
from app.utils.phase_timer import PhaseTimer
from app.weight_sync.adapters.adapter_sender import ADAPTER_EXTENSION, AdapterPush, AdapterSender
from app.weight_sync.deadlines import Deadline, best_effort
from app.weight_sync.synchronizer import CLOSE_TIMEOUT_S, sync_seconds
from app.weight_sync.transport.base import TRAINER_RANKS


class AdapterSynchronizer:
    """Implements `WeightSynchronizer` (app/protocols.py).

    Lifecycle: as `BucketedWeightSynchronizer`.

    Args:
        trainer: The ranks that train the adapters.
        engines: The engines that serve them.
        config: Settings of `weight_sync`.
        tensor_parallel: Ranks of an engine.
        one_machine: Whether the engines see the shared memory of trainer rank 0; else they get the bytes over HTTP.
    """

    def __init__(
        self,
        trainer: RemoteTrainer,
        engines: Sequence[RolloutEngine],
        config: WeightSyncConfig,
        *,
        tensor_parallel: int,
        one_machine: bool,
    ):
        self.trainer = trainer
        self.engines = dict(enumerate(engines))  # by engine index
        self.config = config
        self.tensor_parallel = tensor_parallel
        self.one_machine = one_machine

    async def prepare(self) -> None:
        """Attach the senders to the ranks of a trainer that has loaded its model."""
        await self.trainer.attach(ADAPTER_EXTENSION, AdapterSender)

    def set_engines(self, engines: Mapping[int, RolloutEngine]) -> None:
        """Sync to these engines, by engine index."""
        self.engines = dict(engines)

    async def sync(self, version: int) -> SyncReport:
        """Load the trainer's adapters into every engine as policy `version`. See `WeightSynchronizer.sync`."""
        deadline = Deadline(version, self.config.timeout_s)
        started, timer = time.perf_counter(), PhaseTimer()
        engines = list(self.engines.values())
        try:
            with timer.phase("gather"):
                push = await self._gather(deadline)
            with timer.phase("load"):
                body = push.body(self.tensor_parallel)
                calls = {engine.name: engine.load_adapter(version, body) for engine in engines}
                loaded = await deadline.gather("loading the adapter", calls)
            with timer.phase("resume"):  # engines that were drained to hand their devices to the trainer
                await deadline.gather("resume", {engine.name: engine.resume() for engine in engines})
        finally:
            await self._call_best_effort(AdapterSender.release)

        return SyncReport(
            version=version,
            bytes=push.bytes,
            buckets=1,
            seconds=sync_seconds(timer, started),
            adapters=max(loaded.values(), default=0),
        )

    async def abort(self) -> None:
        """Nothing stays open after a failure: a load that still runs ends with a complete adapter, or none."""

    async def close(self) -> None:
        """Free what the senders left in shared memory, which would outlive a killed process."""
        await self._call_best_effort(AdapterSender.close)

    async def _call_best_effort(self, method: Callable[[AdapterSender], None]) -> None:
        await best_effort({TRAINER_RANKS: self.trainer.call(ADAPTER_EXTENSION, method)}, CLOSE_TIMEOUT_S)

    async def _gather(self, deadline: Deadline) -> AdapterPush:
        gathering = self.trainer.call(ADAPTER_EXTENSION, AdapterSender.gather, one_machine=self.one_machine)
        push = (await deadline.gather("gathering the adapter", {TRAINER_RANKS: gathering}))[TRAINER_RANKS][0]
        if push is None:
            raise SyncError(f"weight sync of policy {deadline.version}: trainer rank 0 gathered nothing")
        return push

"""The weight synchronizer of LoRA: gives every engine the adapter of a policy version, beside those in use.

    gather on the trainer → every engine loads it → later requests are sampled with it

Invariants:
    - No engine is paused, and nothing in flight changes its policy: a request ends with the adapter it began with.
    - The base is never sent: the engines loaded it from the same directory as the trainer.
    - A failed sync leaves every engine with a complete adapter of this policy or of an earlier one.

A push is small (132 MB for rank 32 of a 4B), so rank 0 gathers all of it at once and needs no buckets. Engines on its
machine read it from a file in shared memory; others get its bytes in the request.
"""

import base64
import json
import pickle
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.weight_sync import WeightSyncConfig
from app.errors import SyncError
from app.protocols import RolloutEngine
from app.trainer.rank import TrainerRank
from app.trainer.remote import RemoteTrainer
from app.types import SyncReport, TrainerMemory
from app.utils.phase_timer import PhaseTimer
from app.utils.process import SHARED_MEMORY, run_prefix
from app.weight_sync.buckets import Receivers
from app.weight_sync.synchronizer import CLOSE_TIMEOUT_S, sync_seconds
from app.weight_sync.transport.base import SENDER_EXTENSION, TRAINER_RANKS, Deadline, best_effort

if TYPE_CHECKING:
    from torch import Tensor


class AdapterSender:
    """Gathers the adapters of a trainer rank.

    Lifecycle: `gather`, then `release` when the engines have loaded them, and at the end.
    """

    def __init__(self, trainer_rank: TrainerRank):
        import torch

        from app.model.policy import named_trained_tensors

        self.trainer_rank = trainer_rank
        self.dtype = getattr(torch, trainer_rank.spec.dtype.name)
        self.tensors = dict(named_trained_tensors(trainer_rank.model))
        self.receivers = Receivers.rank_0 if trainer_rank.device.has_gather else Receivers.rank_0_by_all_gather
        self._folder: Path | None = None

    def gather(self, copies: int) -> tuple[dict[str, Any], int] | None:
        """Gather the adapters in the engines' dtype. A collective.

        Args:
            copies: Ranks of an engine, which get the bytes in a request. 0: engines see this machine's shared memory.

        Returns:
            The body of `RolloutEngine.load_adapter`, and the bytes of the adapter; None on ranks other than 0.

        Raises:
            SyncError: The shared memory is full.
        """
        from app.model.lora.names import served_config

        self.trainer_rank.require_onloaded("weight sync", TrainerMemory.parameters)
        self._remove()
        tensors = dict(pair for name in self.tensors for pair in self._gather(name))
        if self.trainer_rank.rank != 0:
            return None

        size = sum(tensor.nbytes for tensor in tensors.values())
        config = served_config(self.trainer_rank.spec.lora)
        if not copies:
            self._folder = _write(tensors, config, size)
            return {"lora_path": str(self._folder)}, size
        # As SGLang's `/load_lora_adapter_from_tensors` takes them: base64 of a pickle of tensors.
        clones = {name: tensor.clone() for name, tensor in tensors.items()}
        payload = base64.b64encode(pickle.dumps(clones, protocol=pickle.HIGHEST_PROTOCOL)).decode()
        return {"config_dict": config, "serialized_named_tensors": [payload] * copies}, size

    def release(self) -> None:
        """Remove the last push from shared memory. Idempotent. Engines that read it keep what they need."""
        self._remove()
        self.trainer_rank.profiler.finish()

    def _remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _gather(self, name: str) -> "list[tuple[str, Tensor]]":
        import torch

        from app.model.lora.names import served
        from app.weight_sync.gather import gather_full

        tensor = self.tensors[name].detach()
        out = None
        if self.trainer_rank.rank == 0:
            out = torch.empty(tensor.numel(), dtype=self.dtype, device=tensor.device)
        gather_full(tensor, self.dtype, out=out, receivers=self.receivers)
        if out is None:
            return []
        return served(name, out.cpu().view(tensor.shape), self.trainer_rank.model.config)


def _write(tensors: "dict[str, Tensor]", config: dict[str, Any], size: int) -> Path:
    from safetensors.torch import save_file

    free = shutil.disk_usage(SHARED_MEMORY).free
    if size > free:
        raise SyncError(
            f"the adapter needs {size / 2**20:.0f} MiB, but {SHARED_MEMORY} has only {free / 2**20:.0f} MiB free: give "
            "the machine more shared memory"
        )
    folder = Path(tempfile.mkdtemp(prefix=f"{run_prefix()}adapter-", dir=SHARED_MEMORY))
    try:
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        # clones: parts of a fused projection share their A, which safetensors refuses
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


@dataclass(eq=False)
class AdapterSynchronizer:
    """Implements `WeightSynchronizer` (app/protocols.py), with the lifecycle of `BucketedWeightSynchronizer`."""

    trainer: RemoteTrainer
    engines: dict[int, RolloutEngine]  # by engine index
    config: WeightSyncConfig
    tensor_parallel: int  # ranks of an engine
    one_machine: bool  # the engines see the shared memory of trainer rank 0; else they get the bytes over HTTP

    async def prepare(self) -> None:
        await self.trainer.attach(SENDER_EXTENSION, AdapterSender)

    def set_engines(self, engines: Mapping[int, RolloutEngine]) -> None:
        self.engines = dict(engines)

    async def sync(self, version: int) -> SyncReport:
        """Load the trainer's adapters into every engine as policy `version`. See `WeightSynchronizer.sync`."""
        deadline = Deadline(version, self.config.timeout_s)
        started, timer = time.perf_counter(), PhaseTimer()
        engines = list(self.engines.values())
        try:
            with timer.phase("gather"):
                copies = 0 if self.one_machine else self.tensor_parallel
                gathering = self.trainer.call(SENDER_EXTENSION, AdapterSender.gather, copies=copies)
                gathered = await deadline.gather("gathering the adapter", {TRAINER_RANKS: gathering})
                body, size = gathered[TRAINER_RANKS][0]
            with timer.phase("load"):
                calls = {engine.name: engine.load_adapter(version, body) for engine in engines}
                loaded = await deadline.gather("loading the adapter", calls)
            with timer.phase("resume"):  # engines that were drained to hand their devices to the trainer
                await deadline.gather("resume", {engine.name: engine.resume() for engine in engines})
        finally:
            await self.close()

        adapters = max(loaded.values(), default=0)
        seconds = sync_seconds(timer, started)
        return SyncReport(version=version, bytes=size, buckets=1, seconds=seconds, adapters=adapters)

    async def abort(self) -> None:
        """Nothing stays open after a failure: a load that still runs ends with a complete adapter, or none."""

    async def close(self) -> None:
        """Remove what the last sync has left in shared memory."""
        releasing = self.trainer.call(SENDER_EXTENSION, AdapterSender.release)
        await best_effort({TRAINER_RANKS: releasing}, CLOSE_TIMEOUT_S)

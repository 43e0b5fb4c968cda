"""Transport `ipc`: no bytes are sent; an engine rank reads each bucket from the memory of a trainer rank.

Each trainer rank gathers the whole bucket into a buffer (device memory, or named shared memory on a CPU) and passes an
IPC handle of it to the engine rank on the same device: rank t of engine e shares a device with trainer rank
e · tensor_parallel + t. An engine replies once it has read the buffer, which bucket k + 2 then overwrites.
"""

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.errors import SyncError
from app.protocols import RolloutEngine
from app.trainer.rank import TrainerRank
from app.trainer.remote import RemoteTrainer
from app.utils.process import SHARED_MEMORY
from app.weight_sync.buckets import ReadyBucket
from app.weight_sync.sender import BUFFERS, Sender
from app.weight_sync.transport.base import SENDER_EXTENSION, TRAINER_RANKS, Deadline, best_effort

if TYPE_CHECKING:
    from torch import Tensor

ABORT_TIMEOUT_S = 3.0


class IpcSender(Sender):
    """The trainer ranks' half: every rank serves the engine rank on its device, by a handle of its buffer."""

    on_all_ranks = True

    def __init__(self, trainer_rank: TrainerRank):
        super().__init__(trainer_rank)
        self._released_names: list[str] = []  # of the shared memory of released buffers

    def allocate(self, size: int) -> "Tensor":
        from app.weight_sync.transport.ipc_payload import allocate_shared

        if self.device.type == "cpu":
            free = shutil.disk_usage(SHARED_MEMORY).free
            if size > free:
                raise SyncError(
                    f"trainer rank {self.rank_index}: a bucket needs {size / 2**20:.0f} MiB, but {SHARED_MEMORY} has "
                    f"only {free / 2**20:.0f} MiB free: set weight_sync.transport=collective, reduce "
                    "weight_sync.bucket_mib, or give the machine more shared memory"
                )
        return allocate_shared(size, self.device)

    def ipc_handle(self, index: int) -> str | None:
        from app.weight_sync.transport.ipc_payload import serialize_bucket

        # An unopened handle keeps its buffer's memory on the device, also when the buffer is freed.
        if self.rank_index // self.tensor_parallel not in self.engines:
            return None
        slot = index % BUFFERS
        return serialize_bucket(self.buffers[slot], self.ready[slot].bucket)

    def abort(self) -> None:
        """Release the buffers: a request still in flight must not read a bucket of a later sync."""
        self.release()

    def release(self) -> None:
        from app.weight_sync.transport.ipc_payload import shared_memory_name

        if self.device.type == "cpu":
            self._released_names += [shared_memory_name(buffer) for buffer in self.buffers]
        super().release()

    def close(self) -> None:
        """Unlink the shared memory. It would outlive this process if an engine never opened a handle of it."""
        super().close()
        for name in self._released_names:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


class IpcTransport:
    """The driver's half. Implements `Transport`."""

    sender = IpcSender
    route = "update_weights_from_tensor"  # deltas: sglang_plugin/delta_loader.py:DeltaLoader.from_ipc

    def __init__(self, tensor_parallel: int):
        self.tensor_parallel = tensor_parallel

    async def connect(self, deadline: Deadline, trainer: RemoteTrainer, engines: Sequence[RolloutEngine]) -> bool:
        return True

    def request_body(self, engine_index: int, ready: Sequence[ReadyBucket]) -> dict[str, Any]:
        first = engine_index * self.tensor_parallel
        return {
            "serialized_named_tensors": [each.ipc_handle for each in ready[first : first + self.tensor_parallel]],
            "load_format": "flattened_bucket",
        }

    async def abort(self, trainer: RemoteTrainer) -> None:
        await best_effort({TRAINER_RANKS: trainer.call(SENDER_EXTENSION, IpcSender.abort)}, ABORT_TIMEOUT_S)

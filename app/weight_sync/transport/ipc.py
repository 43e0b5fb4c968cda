"""Transport `handle`: no byte travels; the engine rank reads the bucket where the trainer rank on its card wrote it.

Each trainer rank gathers the whole bucket into a buffer of its own (device memory, or named shared memory on a CPU) and
offers a handle of it to the engine rank on the same card: engine e's rank t stands beside trainer rank e · width + t.
The engine's reply says that it has read the buffer, which is the one that bucket k + 2 will be gathered into.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from app.errors import SyncError
from app.protocols import RolloutEngine
from app.weight_sync.buckets import ReadyBucket
from app.weight_sync.deadlines import Deadline, best_effort
from app.weight_sync.sender import BUFFERS, Sender
from app.weight_sync.transport import ipc_payload as payload
from app.weight_sync.transport.base import RANKS, SENDER, TrainerGroup

ABANDON_SECONDS = 3.0
SHARED_MEMORY = Path("/dev/shm")


class HandleSender(Sender):
    """Every rank serves the engine rank on its card."""

    everywhere = True

    def __init__(self, host: Any):
        super().__init__(host)
        self._names: list[str] = []  # of shared memory given up

    def allocate(self, size: int) -> Tensor:
        if self.device.type == "cpu":
            free = shutil.disk_usage(SHARED_MEMORY).free
            if size > free:
                raise SyncError(
                    f"trainer rank {self.rank}: {SHARED_MEMORY} has {free / 2**20:.0f} MiB free, a bucket needs "
                    f"{size / 2**20:.0f}: give weight_sync.transport=collective, a smaller weight_sync.bucket_mib, or "
                    "the machine more shared memory"
                )
        return payload.allocate(size, self.device)

    def handle(self, index: int) -> str:
        return payload.serialize(self.buffers[index % BUFFERS], self.packed[index % BUFFERS].bucket)

    def abandon(self) -> None:
        """Give the buffers up: a request that is still on its way must not find the memory of a later bucket."""
        self.release()

    def release(self) -> None:
        if self.device.type == "cpu":
            self._names += [payload.file_of(buffer) for buffer in self.buffers]
        super().release()

    def close(self) -> None:
        """Named memory stays while a handle of it is not redeemed, so it is unlinked here: nobody asks for it again."""
        self.release()
        for name in self._names:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


class IpcTransport:
    """Implements `Transport`."""

    sender = HandleSender
    route = "update_weights_from_tensor"

    def __init__(self, *, tensor_parallel: int):
        self.tensor_parallel = tensor_parallel

    async def connect(self, waits: Deadline, ranks: TrainerGroup, engines: Sequence[RolloutEngine]) -> bool:
        return True

    def ask(self, engine: int, offered: Sequence[ReadyBucket]) -> dict[str, Any]:
        first = engine * self.tensor_parallel
        return {
            "serialized_named_tensors": [each.handle for each in offered[first : first + self.tensor_parallel]],
            "load_format": "flattened_bucket",
        }

    async def abandon(self, ranks: TrainerGroup) -> None:
        await best_effort({RANKS: ranks.call(SENDER, Sender.abandon)}, ABANDON_SECONDS)

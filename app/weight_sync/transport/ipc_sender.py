"""The trainer ranks' half of transport `ipc`: buffers in shared memory, and handles of them."""

import shutil

from torch import Tensor

from app.errors import SyncError
from app.trainer.rank import TrainerRank
from app.utils.process import SHARED_MEMORY
from app.weight_sync.sender import BUFFERS, Sender
from app.weight_sync.transport.ipc_payload import allocate_shared, serialize_bucket, shared_memory_name


class IpcSender(Sender):
    """Every rank serves the engine rank on its device."""

    on_all_ranks = True

    def __init__(self, trainer_rank: TrainerRank):
        super().__init__(trainer_rank)
        self._released_names: list[str] = []  # of the shared memory of released buffers

    def allocate(self, size: int) -> Tensor:
        if self.device.type == "cpu":
            free = shutil.disk_usage(SHARED_MEMORY).free
            if size > free:
                raise SyncError(
                    f"trainer rank {self.rank_index}: a bucket needs {size / 2**20:.0f} MiB, but {SHARED_MEMORY} has "
                    f"only {free / 2**20:.0f} MiB free: set weight_sync.transport=collective, reduce "
                    "weight_sync.bucket_mib, or give the machine more shared memory"
                )
        return allocate_shared(size, self.device)

    def ipc_handle(self, index: int) -> str:
        slot = index % BUFFERS
        return serialize_bucket(self.buffers[slot], self.ready[slot].bucket)

    def abort(self) -> None:
        """Release the buffers: a request still in flight must not read a bucket of a later sync."""
        self.release()

    def release(self) -> None:
        if self.device.type == "cpu":
            self._released_names += [shared_memory_name(buffer) for buffer in self.buffers]
        super().release()

    def close(self) -> None:
        """Unlink the shared memory. It would outlive this process if an engine never opened a handle of it."""
        super().close()
        for name in self._released_names:
            (SHARED_MEMORY / name).unlink(missing_ok=True)

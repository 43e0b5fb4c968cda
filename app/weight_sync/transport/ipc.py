"""Transport `ipc`: no bytes are sent; an engine rank reads each bucket from the memory of a trainer rank.

Each trainer rank gathers the whole bucket into a buffer (device memory, or named shared memory on a CPU) and passes an
IPC handle of it to the engine rank on the same device: rank t of engine e shares a device with trainer rank
e · tensor_parallel + t. An engine replies once it has read the buffer, which bucket k + 2 then overwrites.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.protocols import RolloutEngine
from app.utils.dotted_path import ByName
from app.weight_sync.buckets import ReadyBucket
from app.weight_sync.deadlines import Deadline, best_effort
from app.weight_sync.transport.base import SENDER_EXTENSION, TRAINER_RANKS, TrainerGroup

if TYPE_CHECKING:
    from app.weight_sync.transport.ipc_sender import IpcSender
else:
    IpcSender = ByName("app.weight_sync.transport.ipc_sender.IpcSender")

ABORT_TIMEOUT_S = 3.0


class IpcTransport:
    """Implements `Transport`."""

    sender = IpcSender
    route = "update_weights_from_tensor"

    def __init__(self, *, tensor_parallel: int, backend: str | None = None):  # it has no process group
        self.tensor_parallel = tensor_parallel

    async def connect(self, deadline: Deadline, trainer: TrainerGroup, engines: Sequence[RolloutEngine]) -> bool:
        return True

    def request_body(self, engine_index: int, ready: Sequence[ReadyBucket]) -> dict[str, Any]:
        first = engine_index * self.tensor_parallel
        return {
            "serialized_named_tensors": [each.ipc_handle for each in ready[first : first + self.tensor_parallel]],
            "load_format": "flattened_bucket",
        }

    async def abort(self, trainer: TrainerGroup) -> None:
        await best_effort({TRAINER_RANKS: trainer.call(SENDER_EXTENSION, IpcSender.abort)}, ABORT_TIMEOUT_S)

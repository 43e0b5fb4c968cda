"""Transport `collective`: trainer rank 0 broadcasts each bucket to every engine rank over a process group.

    driver    request bucket k at engines and ranks         │ replies of k │ request bucket k + 1 …
    rank 0    ░ broadcast k ░ (▓ gather k + 1 ▓ meanwhile)  │              │ ░ broadcast k + 1 ░
    engine    ░ receive k ░ ▒ load k ▒ → reply              │              │

A server replies only after loading. So the broadcast starts before any reply can arrive, and both are awaited together:
an error or a missing reply aborts the process group on both sides, and the next sync builds a new one. Without failures
it is built once.

An abort frees the trainer. It frees an engine that waits inside a broadcast only with Gloo: elsewhere the kernel on its
device does not notice, the engine no longer answers, and recovery replaces it.
"""

import asyncio
import secrets
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.errors import SyncError, one_line
from app.protocols import RolloutEngine
from app.trainer.rank import TrainerRank
from app.trainer.remote import RemoteTrainer
from app.weight_sync.buckets import ReadyBucket
from app.weight_sync.sender import BUFFERS, Sender
from app.weight_sync.transport.base import SENDER_EXTENSION, TRAINER_RANKS, Deadline, best_effort

if TYPE_CHECKING:
    from app.weight_sync.transport.process_group import SyncProcessGroup

JOIN_POLL_S = 0.01
ABORT_TIMEOUT_S = 1.5  # for each side


class BroadcastSender(Sender):
    """The trainer ranks' half: rank 0 is the source of the broadcasts. The others only take part in gathering."""

    def __init__(self, trainer_rank: TrainerRank):
        super().__init__(trainer_rank)
        self._process_group: SyncProcessGroup | None = None

    def connect(self, *, backend: str, address: str, world_size: int, name: str, timeout_s: float) -> int:
        """Open the process group on rank 0; return the port of its store (0 on the other ranks)."""
        from app.weight_sync.transport.process_group import SyncProcessGroup

        if self.rank_index != 0:
            return 0
        self._timeout_s = timeout_s
        self._process_group = SyncProcessGroup(
            backend=backend,
            device=self.device,
            address=address,
            world_size=world_size,
            name=name,
            timeout_s=timeout_s,
            abort_backend=self.trainer_rank.device.abort_backend,
        )
        return self._process_group.port

    def joined(self) -> bool:
        """Return whether all members have joined. Raises `SyncError` if joining failed."""
        process_group = self._process_group
        if process_group is None:
            return True
        with wrap_errors("the process group was not built"):
            return process_group.joined()

    def send(self, index: int) -> None:
        if self.rank_index != 0:
            return
        self.wait(self._timeout_s)
        process_group = self._process_group
        if process_group is None:
            raise SyncError("trainer rank 0: the weight sync was aborted")

        slot = index % BUFFERS
        with wrap_errors("the broadcast failed"):
            process_group.broadcast(self.buffers[slot][: self.ready[slot].bucket.bytes])

    def wait(self, timeout_s: float) -> None:
        process_group = self._process_group
        if process_group is not None:
            with wrap_errors("the broadcast failed"):
                process_group.wait(timeout_s)

    def leave(self, name: str) -> None:
        """Leave the process group of this name; a later one is left alone.

        Runs concurrently with the other calls, any of which may wait for a broadcast.
        """
        process_group = self._process_group
        if process_group is not None and process_group.name == name:
            self._process_group = None
            process_group.abort()


@dataclass(eq=False)
class CollectiveTransport:
    """The driver's half. Implements `Transport`."""

    sender = BroadcastSender
    route = "update_weights_from_distributed"  # deltas: sglang_plugin/delta_loader.py:DeltaLoader.from_collective

    backend: str
    tensor_parallel: int
    _name: str | None = None  # of the process group in use
    _members: list[RolloutEngine] = field(default_factory=list)

    async def connect(self, deadline: Deadline, trainer: RemoteTrainer, engines: Sequence[RolloutEngine]) -> bool:
        if self._name is not None:
            return True
        phase = "building the process group"
        address, _ = (await deadline.gather(phase, {TRAINER_RANKS: trainer.source()}))[TRAINER_RANKS]

        # set the name before anyone joins, so that `abort` also cleans up after a failure below
        self._name = f"weight_update_{secrets.token_hex(4)}"
        self._members = list(engines)
        world_size = 1 + len(engines) * self.tensor_parallel

        opening = trainer.call(
            SENDER_EXTENSION,
            BroadcastSender.connect,
            backend=self.backend,
            address=address,
            world_size=world_size,
            name=self._name,
            timeout_s=deadline.timeout_s,
        )
        ports = (await deadline.gather(phase, {TRAINER_RANKS: opening}))[TRAINER_RANKS]

        calls: dict[str, Coroutine[Any, Any, Any]] = {}
        for index, engine in enumerate(engines):
            body = {
                "master_address": f"[{address}]" if ":" in address else address,  # of IPv6, as in a URL
                "master_port": ports[0],
                "rank_offset": 1 + index * self.tensor_parallel,
                "world_size": world_size,
                "group_name": self._name,
                "backend": self.backend,
            }
            calls[engine.name] = engine.update("init_weights_update_group", body)
        calls[TRAINER_RANKS] = self._wait_until_joined(trainer)
        await deadline.gather(phase, calls)
        return False

    def request_body(self, engine_index: int, ready: Sequence[ReadyBucket]) -> dict[str, Any]:
        tensors = ready[0].bucket.tensors
        return {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self._name,
            "load_format": "flattened_bucket",
        }

    async def abort(self, trainer: RemoteTrainer) -> None:
        """Disconnect the source first: with Gloo its abort unblocks engines that wait inside a broadcast."""
        name, self._name = self._name, None
        if name is None:
            return
        leaving = trainer.interrupt(SENDER_EXTENSION, BroadcastSender.leave, name)
        await best_effort({TRAINER_RANKS: leaving}, ABORT_TIMEOUT_S)

        body = {"group_name": name}
        destroying = {engine.name: engine.update("destroy_weights_update_group", body) for engine in self._members}
        await best_effort(destroying, ABORT_TIMEOUT_S)

    async def _wait_until_joined(self, trainer: RemoteTrainer) -> None:
        while not all(await trainer.call(SENDER_EXTENSION, BroadcastSender.joined)):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(JOIN_POLL_S)


@contextmanager
def wrap_errors(problem: str) -> Iterator[None]:
    """Raise the errors of a process group as `SyncError`."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise SyncError(f"trainer rank 0: {problem}: {type(error).__name__}: {one_line(error)}") from error

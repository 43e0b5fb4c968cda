"""Transport `collective`: trainer rank 0 broadcasts flattened buckets to every engine rank over a process group.

    driver    ask engines for k, tell ranks to advance  │ replies of k │ ask for k + 1 …
    rank 0    ░ wire k ░ (▓ gather k + 1 ▓ meanwhile)   │              │ ░ wire k + 1 ░
    engine    ░ wire k ░ ▒ load k ▒ → reply             │              │

A server replies only after loading, so the broadcast starts before any reply can come and is raced against them: a
refusal or a missing reply aborts the group on both sides, and the next push builds a new one. Without failures a group
is built once.
"""

import asyncio
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from app.errors import SyncError
from app.protocols import RolloutEngine
from app.utils.net import bracketed
from app.weight_sync.buckets import ReadyBucket
from app.weight_sync.deadlines import Deadline, best_effort
from app.weight_sync.sender import BUFFERS, Sender
from app.weight_sync.transport.base import RANKS, SENDER, TrainerGroup, name_of
from app.weight_sync.transport.process_group import Group

JOIN_POLL_SECONDS = 0.01
LEAVE_SECONDS = 3.0


class BroadcastSender(Sender):
    """Rank 0 is the source; the others only gather."""

    def __init__(self, host: Any):
        super().__init__(host)
        self._group: Group | None = None
        self._work: Any = None

    def connect(self, *, backend: str, address: str, world_size: int, name: str, timeout_s: float) -> int:
        """Open the group; returns the port at which the engines meet it (rank 0)."""
        if self.rank != 0:
            return 0
        self._timeout_s = timeout_s
        self._group = Group(backend=backend, address=address, world_size=world_size, name=name, timeout_s=timeout_s)
        return self._group.port

    def joined(self) -> bool:
        if self._group is None:
            return True
        try:
            return self._group.joined()
        except (RuntimeError, ValueError, OSError) as error:
            raise SyncError(f"trainer rank 0: the process group was not built: {first_line(error)}") from error

    def send(self, index: int) -> None:
        if self.rank != 0:
            return
        self.finish(self._timeout_s)
        assert self._group is not None, "connected"
        self._work = self._group.broadcast(self.buffers[index % BUFFERS][: self.packed[index % BUFFERS].bucket.bytes])

    def finish(self, timeout_s: float) -> None:
        if self._work is None:
            return
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise SyncError(f"trainer rank 0: the broadcast failed: {first_line(error)}") from error
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream().synchronize()
        self._work = None

    def abandon(self) -> None:
        group, self._group, self._work = self._group, None, None
        if group is not None:
            group.leave(self.device)


class CollectiveTransport:
    """Implements `Transport`."""

    sender = BroadcastSender
    route = "update_weights_from_distributed"

    def __init__(self, *, backend: str, tensor_parallel: int):
        self.backend, self.tensor_parallel = backend, tensor_parallel
        self._name: str | None = None  # of the group in use
        self._members: list[RolloutEngine] = []

    async def connect(self, waits: Deadline, ranks: TrainerGroup, engines: Sequence[RolloutEngine]) -> bool:
        if self._name is not None:
            return True
        address, _ = await ranks.source()
        # the name is known before anyone joins, so that a failure on the way is cleaned up too
        self._name, self._members = f"weight_update_{secrets.token_hex(4)}", list(engines)
        world = 1 + len(engines) * self.tensor_parallel
        phase = "building the process group"
        opened = await waits.gather(phase, {RANKS: self._open(ranks, self._name, address, world, waits.timeout_s)})
        port = opened[RANKS][0]
        receivers = {
            name_of(engine, index): engine.update(
                "init_weights_update_group",
                {
                    "master_address": bracketed(address),
                    "master_port": port,
                    "rank_offset": 1 + index * self.tensor_parallel,
                    "world_size": world,
                    "group_name": self._name,
                    "backend": self.backend,
                },
            )
            for index, engine in enumerate(engines)
        }
        await waits.gather(phase, {**receivers, RANKS: self._joined(ranks)})
        return False

    def ask(self, engine: int, offered: Sequence[ReadyBucket]) -> dict[str, Any]:
        tensors = offered[0].bucket.tensors
        return {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self._name,
            "load_format": "flattened_bucket",
        }

    async def abandon(self, ranks: TrainerGroup) -> None:
        """The source first: its abort is what frees engines that wait inside a broadcast."""
        name, self._name = self._name, None
        if name is None:
            return
        await best_effort({RANKS: ranks.call(SENDER, Sender.abandon)}, LEAVE_SECONDS / 2)
        leaving = {
            name_of(engine, index): engine.update("destroy_weights_update_group", {"group_name": name})
            for index, engine in enumerate(self._members)
        }
        await best_effort(leaving, LEAVE_SECONDS / 2)

    async def _open(self, ranks: TrainerGroup, name: str, address: str, world: int, timeout_s: float) -> list[int]:
        return await ranks.call(
            SENDER,
            BroadcastSender.connect,
            backend=self.backend,
            address=address,
            world_size=world,
            name=name,
            timeout_s=timeout_s,
        )

    async def _joined(self, ranks: TrainerGroup) -> None:
        while not all(await ranks.call(SENDER, BroadcastSender.joined)):  # noqa: ASYNC110 (the event is another process's)
            await asyncio.sleep(JOIN_POLL_SECONDS)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]

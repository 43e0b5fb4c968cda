"""Stand-ins for NCCL and HCCL, which have habits that Gloo lacks, and for an engine.

A process group of `NcclDouble` or `HcclDouble` has the trainer's rank 0 as its only real member:

- Joining is immediate. The first broadcast builds the communicator: it blocks its thread until all members take part,
  and cannot be interrupted.
- A broadcast in flight does not complete before the members have received it.
- NCCL: `abort` ends broadcasts in flight.
- HCCL: `abort` does nothing, `abort_hccl_comm` does; `Work.wait` ignores its timeout.
"""

import asyncio
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from app.errors import EngineError
from app.types import EngineStats, InFlight


class WorkDouble(dist._Work):
    """A broadcast in flight."""

    def __init__(self, received: threading.Event) -> None:
        super().__init__()
        self.received = received
        self.aborted = threading.Event()

    def is_completed(self) -> bool:
        return self.received.is_set() or self.aborted.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        self.received.wait()  # whatever the timeout
        return True


class NcclDouble(dist.ProcessGroup):
    """NCCL's habits. `made` lists all instances of this process."""

    made: ClassVar[list["NcclDouble"]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks it
        self.timeout = timeout
        self.calls: list[str] = []
        self.works: list[WorkDouble] = []
        self.members_take_part = threading.Event()
        self.members_receive = threading.Event()
        NcclDouble.made.append(self)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "double"

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> WorkDouble:  # type: ignore[override]
        self.members_take_part.wait()
        self.works.append(WorkDouble(self.members_receive))
        return self.works[-1]

    def abort(self) -> None:
        self.calls.append("abort")
        for work in self.works:
            work.aborted.set()


class HcclDouble(NcclDouble):
    """HCCL's habits."""

    def abort(self) -> None:
        self.calls.append("abort")

    def abort_hccl_comm(self, reason: str) -> None:
        self.calls.append("abort_hccl_comm")
        super().abort()


class UnreceivedDouble(NcclDouble):
    """A communicator that is built, whose broadcasts nobody receives."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.members_take_part.set()


class PromptDouble(UnreceivedDouble):
    """A process group in which everything works."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.members_receive.set()


DOUBLES = {
    "nccl_double": NcclDouble,
    "hccl_double": HcclDouble,
    "unreceived_double": UnreceivedDouble,
    "prompt_double": PromptDouble,
}


class Doubles:
    """An extension of a trainer rank that registers the doubles as backends of torch.distributed."""

    def __init__(self, trainer_rank: Any = None) -> None:
        for name, double in DOUBLES.items():
            if name.upper() not in dist.Backend._plugins:
                dist.Backend.register_backend(name, double, devices=["cpu"])


class EngineDouble:
    """An engine that accepts everything, except what `refuses` names: the n-th request of a route."""

    name = "engine 0"

    def __init__(self, refuses: tuple[str, int] | None = None) -> None:
        self.refuses = refuses
        self.requests: list[str] = []  # routes
        self.bodies: list[Mapping[str, Any]] = []

    async def pause(self, in_flight: InFlight) -> None:
        self.requests.append("pause")

    async def resume(self) -> None:
        self.requests.append("resume")

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0)

    async def update(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        index = self.requests.count(route)
        self.requests.append(route)
        self.bodies.append(body)
        await asyncio.sleep(0.2)  # so that the trainer's call begins
        if (route, index) == self.refuses:
            raise EngineError(f"{self.name}: refused by the test")
        return {"success": True}

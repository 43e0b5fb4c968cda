"""What a push needs of the way that buckets take; the push itself knows no transport."""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from app.protocols import RolloutEngine
from app.trainer.rank import TrainerRank
from app.weight_sync.buckets import ReadyBucket
from app.weight_sync.deadlines import Deadline
from app.weight_sync.sender import Sender

P = ParamSpec("P")
T = TypeVar("T")
SENDER = "sync"  # name of the trainer ranks' part
RANKS = "trainer ranks"  # in messages


class TrainerGroup(Protocol):
    """What the driver needs of the trainer: parts on every rank."""

    async def attach(self, name: str, make: Callable[[TrainerRank], object]) -> None: ...

    async def call(
        self, extension: str, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...

    async def source(self) -> tuple[str, int]:
        """Address of rank 0, and a port that is free there."""
        ...


class Transport(Protocol):
    """One transport."""

    @property
    def sender(self) -> type[Sender]: ...

    @property
    def route(self) -> str:
        """The server's update call."""
        ...

    async def connect(self, waits: Deadline, ranks: TrainerGroup, engines: Sequence[RolloutEngine]) -> bool:
        """Make the way ready; True when it was ready already."""
        ...

    def ask(self, engine: int, offered: Sequence[ReadyBucket]) -> dict[str, Any]:
        """The body of an engine's update call, but for cache and version; `offered` by each trainer rank."""
        ...

    async def abandon(self, ranks: TrainerGroup) -> None:
        """Tear the way down on both sides, whatever state it is in; never waits long."""
        ...


def name_of(engine: RolloutEngine, index: int) -> str:
    """The engine's own name, or its place."""
    return str(getattr(engine, "name", f"engine {index}"))

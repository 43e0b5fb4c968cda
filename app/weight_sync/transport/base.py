"""The transport interface. `BucketedWeightSynchronizer` is transport-agnostic."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from app.protocols import RolloutEngine
from app.trainer.rank import TrainerRank
from app.weight_sync.buckets import ReadyBucket
from app.weight_sync.deadlines import Deadline

if TYPE_CHECKING:
    from app.weight_sync.sender import Sender

P = ParamSpec("P")
T = TypeVar("T")
TRAINER_RANKS = "trainer ranks"  # their name in messages
SENDER_EXTENSION: Final = "weight_sync"  # the name under which a `Sender` is attached to every trainer rank


class TrainerGroup(Protocol):
    """All trainer ranks, as the weight sync needs them: extensions on every rank."""

    async def attach(self, name: str, make: Callable[[TrainerRank], object]) -> None:
        """Add the extension `make(rank)` to every rank."""
        ...

    async def call(
        self, extension: str, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of an extension on every rank; return the results in rank order."""
        ...

    async def interrupt(
        self, extension: str, method: Callable[Concatenate[Any, P], None], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call a method of an extension on every rank, concurrently with a call in progress, to end its waiting."""
        ...

    async def source(self) -> tuple[str, int]:
        """Return the address of rank 0 and the port of the rendezvous there."""
        ...


class Transport(Protocol):
    """How buckets get from the trainer ranks into the engines.

    Lifecycle:
        1. `connect` before the first bucket of each sync.
        2. `request_body` for each bucket and engine, while the sender's `send` runs on the trainer ranks.
        3. `abort` after a failure or a change of engines; the next `connect` starts from scratch.
    """

    @property
    def sender(self) -> "type[Sender]":
        """The extension of the trainer ranks."""
        ...

    @property
    def route(self) -> str:
        """The server's route for one bucket."""
        ...

    async def connect(self, deadline: Deadline, trainer: TrainerGroup, engines: Sequence[RolloutEngine]) -> bool:
        """Connect the trainer ranks and the engines; return whether they were connected already."""
        ...

    def request_body(self, engine_index: int, ready: Sequence[ReadyBucket]) -> dict[str, Any]:
        """Return the request body for one engine.

        Args:
            engine_index: The engine's index in the run.
            ready: The gathered bucket, by trainer rank.
        """
        ...

    async def abort(self, trainer: TrainerGroup) -> None:
        """Disconnect both sides in any state, within a few seconds. Idempotent."""
        ...

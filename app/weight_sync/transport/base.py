"""The transport interface. `BucketedWeightSynchronizer` is transport-agnostic."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from app.protocols import RolloutEngine
from app.trainer.remote import RemoteTrainer
from app.weight_sync.buckets import ReadyBucket
from app.weight_sync.deadlines import Deadline

if TYPE_CHECKING:
    from app.weight_sync.sender import Sender

TRAINER_RANKS = "trainer ranks"  # their name in messages
SENDER_EXTENSION: Final = "weight_sync"  # the name under which a `Sender` is attached to every trainer rank


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

    async def connect(self, deadline: Deadline, trainer: RemoteTrainer, engines: Sequence[RolloutEngine]) -> bool:
        """Connect the trainer ranks and the engines; return whether they were connected already."""
        ...

    def request_body(self, engine_index: int, ready: Sequence[ReadyBucket]) -> dict[str, Any]:
        """Return the request body for one engine.

        Args:
            ready: The gathered bucket, by trainer rank.
        """
        ...

    async def abort(self, trainer: RemoteTrainer) -> None:
        """Disconnect both sides in any state, within a few seconds. Idempotent."""
        ...

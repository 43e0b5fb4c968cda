"""The trainer ranks' half of transport `collective`: rank 0 broadcasts each bucket."""

from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import SyncError, one_line
from app.trainer.rank import TrainerRank
from app.weight_sync.sender import BUFFERS, Sender
from app.weight_sync.transport.process_group import SyncProcessGroup


class BroadcastSender(Sender):
    """Rank 0 is the source of the broadcasts. The other ranks only take part in gathering."""

    def __init__(self, trainer_rank: TrainerRank):
        super().__init__(trainer_rank)
        self._process_group: SyncProcessGroup | None = None

    def connect(self, *, backend: str, address: str, world_size: int, name: str, timeout_s: float) -> int:
        """Open the process group on rank 0; return the port of its store (0 on the other ranks)."""
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
        with naming("the process group was not built"):
            return process_group.joined()

    def send(self, index: int) -> None:
        if self.rank_index != 0:
            return
        self.wait(self._timeout_s)
        process_group = self._process_group
        if process_group is None:
            raise SyncError("trainer rank 0: the weight sync was aborted")

        slot = index % BUFFERS
        with naming("the broadcast failed"):
            process_group.broadcast(self.buffers[slot][: self.ready[slot].bucket.bytes])

    def wait(self, timeout_s: float) -> None:
        process_group = self._process_group
        if process_group is not None:
            with naming("the broadcast failed"):
                process_group.wait(timeout_s)

    def leave(self, name: str) -> None:
        """Leave the process group of this name; a later one is left alone.

        Runs concurrently with the other calls, any of which may wait for a broadcast.
        """
        process_group = self._process_group
        if process_group is not None and process_group.name == name:
            self._process_group = None
            process_group.abort()


@contextmanager
def naming(problem: str) -> Iterator[None]:
    """Raise the errors of a process group as `SyncError`."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise SyncError(f"trainer rank 0: {problem}: {type(error).__name__}: {one_line(error)}") from error

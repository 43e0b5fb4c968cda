"""Memory offload of the trainer, where it shares devices with the engines."""

from typing import TYPE_CHECKING

from app.trainer.rank import TrainerRank

if TYPE_CHECKING:
    from app.offload.trainer import Offload


def make_offload(rank: TrainerRank, *, moves: bool) -> "Offload":
    """Create the memory offload of a rank, in its process: the driver, which names this function, has no torch."""
    from app.offload.trainer import Offload

    return Offload(rank, moves=moves)

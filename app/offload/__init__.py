"""Memory offload of the trainer, where it shares devices with the engines.

AdamW's moments are moved within an update by `app/trainer/optimizer.py` (`offload.optimizer`), engines' memory by
`app/rollout/engine/host.py`; `app/placement/time_sharing.py` says when.
"""

from typing import TYPE_CHECKING

from app.trainer.rank import TrainerRank

if TYPE_CHECKING:
    from app.offload.trainer import Offload


def make_offload(rank: TrainerRank, *, moves: bool) -> "Offload":
    """Create the memory offload of a rank, in its process: the driver, which names this function, has no torch."""
    from app.offload.trainer import Offload

    return Offload(rank, moves=moves)

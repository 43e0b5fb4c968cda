"""The trainer's memory while the engine generates: who is where, as a state machine that refuses nonsense.

A part is on the device or away; taking away what is away, or bringing back what is there, is an error here and not a
crash further down (torch-memory-saver ends the process on a double pause).
"""

from typing import TYPE_CHECKING

from app.errors import TrainerError
from app.types import TrainerPart

if TYPE_CHECKING:
    from app.trainer.rank import TrainerRank


class Offload:
    """Attached to every trainer rank. This one moves nothing: for devices on which nothing would be gained."""

    def __init__(self, host: "TrainerRank"):
        self.host = host
        self.away: set[TrainerPart] = set()

    def offload(self, part: TrainerPart) -> None:
        if part in self.away:
            raise TrainerError(f"trainer rank {self.host.rank}: {part.name} is offloaded already")
        self._take_away(part)
        self.away.add(part)

    def onload(self, part: TrainerPart) -> None:
        if part in self.away:
            self._bring_back(part)
            self.away.discard(part)

    def _take_away(self, part: TrainerPart) -> None:
        """Free this part's device memory; its content survives on the host."""

    def _bring_back(self, part: TrainerPart) -> None:
        """Undo `_take_away`."""

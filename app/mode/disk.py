"""Disk space for the checkpoints and the export of a run."""

from dataclasses import dataclass

from app.config.checkpoint import CheckpointConfig

CHECKPOINT_BYTES = 12  # per parameter: float32 master weight and Adam moments
EXPORT_BYTES = 4  # per parameter, at most


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Bytes on disk, at most."""

    checkpoint: int  # bytes of one
    checkpoints: int  # number of them at once
    export: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.checkpoints * self.checkpoint + self.export


def plan_disk(checkpoint: CheckpointConfig, parameters: int) -> DiskPlan:
    """Plan the disk space of a run that trains this number of parameters."""
    export = EXPORT_BYTES * parameters if checkpoint.export else 0
    return DiskPlan(CHECKPOINT_BYTES * parameters, checkpoint.most_on_disk, export)

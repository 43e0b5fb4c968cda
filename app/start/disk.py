"""Disk space for the checkpoints and the export of a run."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from app.config import RunConfig
from app.model.architecture import Architecture, trained_parameters

CHECKPOINT_BYTES = 12  # per trained parameter: float32 master weight and Adam moments
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


def plan_disk(config: RunConfig, model: Architecture) -> DiskPlan:
    """Plan the disk space of a training run."""
    lora = config.model.lora
    trained = trained_parameters(model, lora)
    exported = model.parameters + (trained if lora.enabled else 0)
    export = EXPORT_BYTES * exported if config.checkpoint.export else 0
    return DiskPlan(CHECKPOINT_BYTES * trained, config.checkpoint.most_on_disk, export)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's disk; the folder may not exist yet."""
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    return shutil.disk_usage(existing).free

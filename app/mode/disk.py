"""Disk space for the checkpoints and the export of a run."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from app.config import Mode, RunConfig
from app.config.trainer import Optimizer
from app.errors import ConfigError
from app.model.architecture import Architecture, architecture_of
from app.model.lora.count import trained_parameters
from app.utils.units import size

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


def require_space(config: RunConfig, folder: Path) -> None:
    """Raise `ConfigError` if what a new training run will write does not fit. The run checks again with exact sizes."""
    model = architecture_of(config.model)
    if config.mode is not Mode.train or model is None or config.trainer.optimizer is not Optimizer.adamw:
        return

    needed = plan_disk(config, model).bytes
    free = free_bytes(folder)
    if free < needed:
        accepted = f"a folder with {size(needed)} for checkpoints and the exported model, or lower checkpoint.keep"
        raise ConfigError("hydra.run.dir", folder, accepted, f"it has {size(free)}")

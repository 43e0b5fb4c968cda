"""The folder of a run, while this process writes into it.

Invariants:
- Nothing in the folder changes before this process holds its lock.
- What the mode started has ended when the lock is released, or soon after this process was killed.
- No mode overwrites or deletes the results of another run: the folder is unused, or the run in it is resumed, or it
  ended before its first checkpoint and its records are set aside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from app.cluster.process_reaper import process_reaper
from app.config import Mode, RunConfig
from app.errors import ConfigError, RunError, say
from app.recovery.resume import NEVER, apply_resume, has_checkpoint, holds_run, require_unused
from app.recovery.run_lock import run_lock
from app.tracking.logs import driver_log
from app.tracking.run_folder import CONFIG
from app.tracking.run_folder.aside import set_all_aside
from app.utils.files import replace_file


@contextmanager
def output_folder(composed: DictConfig, config: RunConfig, folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, save the configuration in it, and log to it.

    Args:
        composed: The job's configuration as Hydra composed it.
        config: The same, resolved.
        folder: Where the run writes.

    Raises:
        FolderInUse: Another process holds the lock.
        ConfigError: The folder holds a run that this one does not resume.
        RunError: Another process has changed what `resume` means since it was applied to `composed`.
    """
    with run_lock(folder):
        if config.mode is Mode.train and config.resume != NEVER:
            _require_unchanged(composed, folder)
            _set_aside_unless_resumable(folder)
        else:
            require_unused(folder, config.mode)

        save_configuration(composed, folder)
        # Around the whole mode, so that the dashboards' helpers live until the recorder has closed them.
        with driver_log(folder), process_reaper():
            yield


def save_configuration(composed: DictConfig, folder: Path) -> None:
    """Write `config/`: Hydra's settings, the command line, and last, since resuming needs it, the configuration."""
    config = folder / CONFIG
    config.mkdir(exist_ok=True)
    replace_file(config / "hydra.yaml", OmegaConf.to_yaml(HydraConfig.instance().cfg))
    replace_file(config / "overrides.yaml", OmegaConf.to_yaml(HydraConfig.get().overrides.task))
    replace_file(config / "config.yaml", OmegaConf.to_yaml(composed, resolve=True))


def _require_unchanged(composed: DictConfig, folder: Path) -> None:
    """Raise `RunError` unless `resume` still means what it meant before this process held the lock.

    Applied again to its own result, `resume` changes nothing: unless another process has since written to the folder.
    """
    again = deepcopy(composed)
    with open_dict(again):
        again.hydra = {"run": {"dir": str(folder)}, "overrides": {"task": list(HydraConfig.get().overrides.task)}}
    changed = RunError(f"the run in {folder} has just saved a checkpoint in another process; start again")
    try:
        resumption = apply_resume(again)
    except ConfigError:
        raise changed from None
    with open_dict(again):
        del again["hydra"]
        if again.epochs is not None:
            again.steps = composed.steps  # counted since

    if resumption.finished:
        raise RunError(f"the run in {folder} has just finished in another process")
    if again != composed:
        raise changed


def _set_aside_unless_resumable(folder: Path) -> None:
    """Make room for a run that starts over because its earlier attempt ended before its first checkpoint."""
    if has_checkpoint(folder) or not holds_run(folder):
        return

    moved = set_all_aside(folder)
    say(f"the run in {folder} ended before its first checkpoint: it starts over, and its records are now in {moved}")

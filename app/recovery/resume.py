"""Resume a run that ended early: its folder, its settings, and the lock against a second driver.

The saved configuration wins, so that a run keeps its identity. Only settings that cannot affect the learned policy
(`RESUMABLE`) may be overridden.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from app.checkpoint.folder import FOLDER, latest
from app.checkpoint.run_state import read_state
from app.config import RunConfig
from app.config.compose import one_sentence
from app.errors import ConfigError, DamagedCheckpoint, RunError
from app.tracking.run_folder import metrics_file

NEVER = "never"
AUTO = "auto"
SAVED = Path("config") / "config.yaml"
LOCK = "driver.lock"
RESUMABLE = (
    "steps",
    "resume",
    "checkpoint",
    "cluster",
    "eval.every",
    "offload",
    "placement.devices",
    "placement.trainer_devices",
    "placement.rollout_devices",
    "trainer.profile_steps",
    "recovery",
    "rollout.memory_fraction",
    "rollout.max_inflight_groups",
    "rollout.port",
    "rollout.stall_timeout_s",
    "rollout.start_timeout_s",
    "rollout.urls",
    "tracking",
    "trainer.activation_checkpointing",
    "trainer.timeout_s",
    "trainer.tokens_per_microbatch",
    "weight_sync",
)


def apply_resume(composed: DictConfig) -> list[str]:
    """Replace `composed` by the configuration of the run to resume, if there is one.

    Returns:
        One sentence for each override that is ignored.

    Raises:
        ConfigError: `resume` names no run, or the folder is used and `resume=never`.
    """
    resume = str(composed.resume)
    folder = _given_folder(composed)
    if resume == NEVER:
        _require_unused(folder)
        return []

    if resume != AUTO:
        folder = _folder_of(resume)
        composed.hydra.run.dir = str(folder)
    elif folder is None or not (folder / SAVED).is_file():
        return []  # nothing to resume: a new run
    return _take_over(composed, _saved(folder), resume)


def _take_over(composed: DictConfig, saved: DictConfig, resume: str) -> list[str]:
    """Copy the saved settings into `composed`, except the overrides that are allowed."""
    given = [override.lstrip("+~").split("=", 1)[0] for override in composed.hydra.overrides.task]
    allowed = {key: OmegaConf.select(composed, key) for key in given if _resumable(key)}
    changed = [key for key in given if not _resumable(key) and _differs(composed, saved, key)]

    with open_dict(composed):
        for key in saved:
            composed[key] = saved[key]
        for key, value in allowed.items():
            OmegaConf.update(composed, key, value)
        composed.resume = resume
    return [f"{key} is ignored: a resumed run keeps its saved value" for key in changed]


def finished_at(composed: DictConfig) -> int | None:
    """Return the last step of the run to resume if it has no steps left, else None."""
    if str(composed.resume) == NEVER:
        return None

    folder = _given_folder(composed)
    named = checkpoint_of(str(composed.resume))
    try:
        checkpoint = named or (folder and latest(folder))
        if checkpoint is None:
            return None
        step = read_state(checkpoint).step
    except DamagedCheckpoint:
        if named is not None:
            raise
        return None  # the run resumes from an older one
    return step if step >= int(composed.steps) else None


def checkpoint_of(resume: str) -> Path | None:
    """Return the checkpoint that `resume=` names, if it names a checkpoint and not a run."""
    path = Path(resume)
    return path if path.parent.name == FOLDER and path.is_dir() else None


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock a run's folder. The kernel releases the lock when this process ends.

    Raises:
        RunError: Another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder} is in use: another process is running this run") from None
        yield


def _saved(folder: Path) -> DictConfig:
    """Load the configuration of a run with today's schema."""
    try:
        saved = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(folder / SAVED))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{folder / SAVED} is not a configuration of this version: {one_sentence(error)}") from error
    assert isinstance(saved, DictConfig)
    return saved


def _folder_of(resume: str) -> Path:
    folder = Path(resume)
    if checkpoint_of(resume) is not None:
        folder = folder.parent.parent
    if not (folder / SAVED).is_file():
        raise ConfigError(
            f"resume={resume} is not accepted: give auto, never, a run's folder (with {SAVED} in it) or one of its "
            "checkpoints."
        )
    return folder


def _given_folder(composed: DictConfig) -> Path | None:
    """Return `hydra.run.dir`; None for the default, which names a new folder each time."""
    try:
        return Path(str(OmegaConf.select(composed, "hydra.run.dir")))
    except InterpolationResolutionError:  # the default names the group choices, which Hydra has not resolved yet
        return None


def _require_unused(folder: Path | None) -> None:
    if folder is None:
        return

    path = folder / metrics_file.NAME
    if path.is_file() and path.stat().st_size:
        raise ConfigError(
            f"hydra.run.dir={folder} is not accepted: it already holds a run; give resume=auto to continue it, or "
            "another folder."
        )


def _resumable(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in RESUMABLE) or key.startswith("hydra")


def _differs(composed: DictConfig, saved: DictConfig, key: str) -> bool:
    return bool(_plain(OmegaConf.select(composed, key)) != _plain(OmegaConf.select(saved, key)))


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True, enum_to_str=True) if OmegaConf.is_config(node) else str(node)

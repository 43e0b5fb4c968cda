"""Going on with a run that ended before its time: which folder, which settings, and that nobody else goes on with it.

The saved configuration wins, so that a run stays the run that it was; only what cannot change what is learnt from
which data (`RESUMABLE`) may be given anew on the command line.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from app.checkpoint.manager import FOLDER, latest, read_state
from app.config import RunConfig
from app.config.compose import one_sentence
from app.errors import ConfigError, RunError
from app.tracking.run_folder import metrics_file as jsonl

NEVER, AUTO = "never", "auto"
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
    """Make `composed` that of the run to be resumed, if there is one; returns what was given in vain, as sentences.

    Raises `ConfigError` for a folder that is no run's, or one that is used where `resume=never`.
    """
    resume, folder = str(composed.resume), _given_folder(composed)
    if resume == NEVER:
        _require_unused(folder)
        return []
    if resume != AUTO:
        folder = _folder_of(resume)
        composed.hydra.run.dir = str(folder)
    elif folder is None or not (folder / SAVED).is_file():
        return []  # nothing to go on with: a new run
    saved = _saved(folder)
    given = [override.lstrip("+~").split("=", 1)[0] for override in composed.hydra.overrides.task]
    anew = {key: OmegaConf.select(composed, key) for key in given if _resumable(key)}
    ignored = [
        f"{key} is that of the run that is resumed, and not what was given: it cannot change any more"
        for key in given
        if not _resumable(key) and _plain(OmegaConf.select(composed, key)) != _plain(OmegaConf.select(saved, key))
    ]
    with open_dict(composed):
        for key in saved:
            composed[key] = saved[key]
        for key, value in anew.items():
            OmegaConf.update(composed, key, value)
        composed.resume = resume
    return ignored


def finished_at(composed: DictConfig) -> int | None:
    """The last step of a run that is to be resumed and has none left to do."""
    if str(composed.resume) == NEVER:
        return None
    folder = _given_folder(composed)
    point = checkpoint_of(str(composed.resume)) or (folder and latest(folder))
    if point is None:
        return None
    step = read_state(point).step
    return step if step >= int(composed.steps) else None


def checkpoint_of(resume: str) -> Path | None:
    """The checkpoint that `resume=` names, if it names one and not a run."""
    path = Path(resume)
    return path if path.parent.name == FOLDER and path.is_dir() else None


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the run's folder; `RunError` where another process holds it. Freed by the kernel when this one ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder} is in use: another process is running this run") from None
        yield


def _saved(folder: Path) -> DictConfig:
    """The configuration that a run was begun with, in the types of today."""
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
    """`hydra.run.dir`; None for the default, which names a new folder each time."""
    try:
        return Path(str(OmegaConf.select(composed, "hydra.run.dir")))
    except InterpolationResolutionError:  # of the choices, which Hydra does not know yet
        return None


def _require_unused(folder: Path | None) -> None:
    if folder is None:
        return
    path = folder / jsonl.NAME
    if path.is_file() and path.stat().st_size:
        raise ConfigError(
            f"hydra.run.dir={folder} is not accepted: it holds a run already; give resume=auto to go on with that, or "
            "another folder."
        )


def _resumable(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in RESUMABLE) or key.startswith("hydra")


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True, enum_to_str=True) if OmegaConf.is_config(node) else str(node)

"""Resolves `resume=`: the saved configuration of a run, with the overrides of this command.

Changes made by overrides are printed. An override that would make the run a different one is refused: a training run
may change only settings that cannot affect the learned policy (`RESUMABLE`), an evaluation only those that leave the
model as it is (`EVALUABLE`).

Invariants:
- Nothing here writes: a refusal comes before any folder is touched.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from app.checkpoint.folder import FOLDER, LATEST, latest, list_checkpoints, named
from app.checkpoint.run_state import read_state
from app.config import Mode
from app.config.command_line import names_of, override
from app.config.stop import StopConfig
from app.errors import ConfigError, DamagedCheckpoint, expect
from app.recovery.saved_config import SAVED, load, take_over
from app.stop import stop_reason
from app.tracking.run_folder import metrics_file, summary

NEVER = "never"
AUTO = "auto"
RESULTS = (metrics_file.NAME, "parity.json")  # a folder with one of them holds a run
# Files of model.path and model.chat_template may move: the checkpoint identifies their content.
RESUMABLE = (
    "steps", "epochs", "stop", "eval.every", "checkpoint", "tracking", "recovery", "cluster", "offload", "weight_sync",
    "model.path", "model.chat_template", "placement.devices", "placement.trainer_devices", "placement.rollout_devices",
    "rollout.urls", "rollout.port", "rollout.memory_fraction", "rollout.max_inflight_groups", "rollout.speculative",
    "rollout.stall_timeout_s", "rollout.start_timeout_s", "teacher.urls", "teacher.devices", "teacher.timeout_s",
    "trainer.compile", "trainer.activation_checkpointing", "trainer.tokens_per_microbatch", "trainer.profile_steps",
    "trainer.replicas", "trainer.timeout_s",
)  # fmt: skip
EVALUABLE = (
    "data", "reward", "eval", "rollout", "device", "placement", "model.path", "tracking", "recovery", "cluster",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Resumption:
    """The settings of a run, and the checkpoint that it continues from."""

    settings: DictConfig
    folder: Path  # of the run
    checkpoint: Path | None = None  # to start from; None also if the latest is damaged and the run picks another
    notes: tuple[str, ...] = ()  # for the screen
    accuracy: float | None = None  # of the last evaluation, if nothing is left to do


def resume_training(settings: DictConfig, folder: Path) -> Resumption:
    """Return the training run to continue, or the new one in `folder`.

    Raises `ConfigError` if `resume` names no run that can be continued, or a new one would have a used folder.
    """
    resume = str(settings.resume)
    notes: tuple[str, ...] = ()
    if resume == AUTO and not (settings.checkpoint.keep and settings.checkpoint.every):
        notes = ("resume=auto: a run that is killed loses all its steps without checkpoint.every and checkpoint.keep",)
    if resume == NEVER or (resume == AUTO and not (folder / SAVED).is_file()):
        require_unused(folder, settings.mode)
        return Resumption(settings, folder, notes=notes)

    checkpoint = None
    if resume != AUTO:
        own, checkpoint = locate(resume)
        given: Any = OmegaConf.to_container(settings.hydra, resolve=False)
        is_default = "${" in given["run"]["dir"]
        same = is_default or os.path.abspath(folder) == os.path.abspath(own)
        expect(same, "hydra.run.dir", folder, f"none with resume={resume}, which continues the run in its own folder")
        folder = own

    saved = load(folder)
    given_mode = "mode" in names_of(settings.hydra.overrides.task)
    if saved.mode is not settings.mode and (given_mode or not saved.mode.trains):
        raise ConfigError("resume", resume, reason=f"{folder} holds a run of mode={saved.mode.name}")

    saves = checkpoint is not None or has_checkpoint(folder)
    finished = summary.is_finished(folder)
    if not saves and not finished:
        accepted = f"resume=auto {override('hydra.run.dir', folder)}, which starts over and sets its records aside"
        expect(resume == AUTO, "resume", resume, f"{accepted}; the run in {folder} has no checkpoint")
        return Resumption(settings, folder, notes=notes)

    merged, changes = take_over(settings, saved, folder, RESUMABLE)
    merged.mode = saved.mode
    notes += changes
    checkpoint = checkpoint or _intact_latest(folder)
    if saves and checkpoint is None:
        return Resumption(merged, folder, notes=notes)
    if checkpoint is not None and settings.epochs not in (None, saved.epochs):  # the steps are counted with the rows
        return Resumption(merged, folder, checkpoint, notes)

    step = int(summary.read(folder).get("steps", 0)) if checkpoint is None else read_state(checkpoint).step
    stopped = _stopped(merged, folder, step)
    # A run that ended after its last step may still have to evaluate and export it.
    if stopped or step > merged.steps or (step == merged.steps and finished):
        ended = f"{'finished' if finished else 'is'} at step {step}: give a larger steps=… to continue it"
        if stopped:
            ended = f"stopped early at step {step} ({stopped}): change that setting, or give null, to continue it"
        accuracy = summary.accuracy(summary.read(folder))
        return Resumption(merged, folder, notes=(*notes, f"the run in {folder} {ended}"), accuracy=accuracy)
    accepted = f"another hydra.run.dir; the run in {folder} finished at step {step} without a checkpoint"
    expect(checkpoint is not None, "steps", merged.steps, accepted)
    return Resumption(merged, folder, checkpoint, notes)


def resume_evaluation(settings: DictConfig, folder: Path) -> Resumption:
    """Return the evaluation in `folder` of the checkpoint that `resume` names, or else of the model."""
    require_unused(folder, Mode.eval)
    if settings.resume == NEVER:
        return Resumption(settings, folder)
    run, checkpoint = locate(str(settings.resume))
    checkpoint = checkpoint or latest(run)
    expect(checkpoint is not None, "resume", settings.resume, f"a run with checkpoints; {list_checkpoints(run)}")
    merged, notes = take_over(settings, load(run), run, EVALUABLE)
    merged.resume = str(checkpoint)
    return Resumption(merged, folder, checkpoint, notes)


def resume_preview(settings: DictConfig, folder: Path) -> Resumption:
    """Return what `mode=plan` and `mode=doctor` describe: the run that `resume` names, as it would continue."""
    run = folder if settings.resume in (NEVER, AUTO) else locate(str(settings.resume))[0]
    if settings.resume == NEVER or not (run / SAVED).is_file():
        return Resumption(settings, folder)
    saved = load(run)
    merged, notes = take_over(settings, saved, run, (*RESUMABLE, *EVALUABLE))
    merged.mode = saved.mode if saved.mode is Mode.sft else merged.mode
    return Resumption(merged, run, notes=notes)


def locate(resume: str) -> tuple[Path, Path | None]:
    """Return the folder of the run that `resume=` names, and the checkpoint if it names one."""
    folder, path = run_named(resume), Path(resume).expanduser().absolute()
    of_checkpoint = folder != path
    accepted = f"auto, never, a run's folder (with {SAVED} in it) or one of its checkpoints"
    expect((folder / SAVED).is_file(), "resume", resume, accepted)
    checkpoint = named(path) if of_checkpoint else None
    if checkpoint is not None:
        read_state(checkpoint)
    expect(checkpoint is not None or not of_checkpoint, "resume", resume, f"{accepted}; {list_checkpoints(path)}")
    return folder, checkpoint


def run_named(resume: str) -> Path:
    """Return the folder of the run that `resume=` names, by itself or by a checkpoint, whether it is there or not."""
    path = Path(resume).expanduser().absolute()
    return path.parent.parent if path.parent.name == FOLDER else path


def require_unused(folder: Path, mode: Mode) -> None:
    """Raise `ConfigError` if the folder already holds a run."""
    is_saved = (folder / SAVED).is_file()  # else nothing can continue it
    accepted = "resume=auto to continue it, or another folder" if mode.trains and is_saved else "another folder"
    if mode is Mode.eval and is_saved:
        accepted += f", or {override('resume', folder)} without hydra.run.dir to evaluate that run"
    expect(not holds_run(folder), "hydra.run.dir", folder, f"{accepted}; it already holds a run")


def holds_run(folder: Path) -> bool:
    """Whether a run left results in the folder. The logs of a run that failed at its start do not count."""
    files = [folder / name for name in RESULTS]
    return has_checkpoint(folder) or any(file.is_file() and file.stat().st_size for file in files)


def has_checkpoint(folder: Path) -> bool:
    """Whether the run in the folder committed a checkpoint, intact or not."""
    return (folder / FOLDER / LATEST).is_file()


def state_of(folder: Path) -> tuple[int, ...]:
    """Return when each file that a resume depends on was last replaced; 0 if it does not exist."""
    files = [folder / name for name in (SAVED, summary.NAME, Path(FOLDER) / LATEST)]
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)


def _intact_latest(folder: Path) -> Path | None:
    """Return the latest checkpoint; None without one, or if it is damaged: the run then takes an older one."""
    try:
        checkpoint = latest(folder)
        if checkpoint is not None:
            read_state(checkpoint)
        return checkpoint
    except DamagedCheckpoint:
        return None


def _stopped(settings: DictConfig, folder: Path, step: int) -> str | None:
    """Return why the finished run in the folder would stop again at its last step with these settings, or None."""
    if not summary.is_finished(folder) or summary.read(folder).get("steps") != step:
        return None
    rows = metrics_file.read(folder / metrics_file.NAME)
    accuracies = {row["step"]: row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None}
    stop = StopConfig(settings.stop.at_accuracy, settings.stop.patience)
    return stop_reason(stop, accuracies, step=step, last_step=int(settings.steps))

"""Settles what a command runs: its configuration with `resume` applied, its folder, and the run that it continues."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from app.config import Mode, RunConfig, compose
from app.errors import expect
from app.recovery import resume

PREVIEWS = (Mode.plan, Mode.doctor)  # of a run with the same settings


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a mode."""

    mode: Mode  # that of `config`, but for a preview of mode=sft
    config: RunConfig
    resumption: resume.Resumption
    given_folder: Path | None  # `hydra.run.dir`; None where it is left to its default, a new folder
    seen: tuple[int, ...]  # state of the folder, on which all of this depends

    @property
    def folder(self) -> Path:
        return self.resumption.folder


def settle(composed: DictConfig, folder: Path, *, sweep: bool = False) -> Job:
    """Return what is run: the composition, which is not changed, with `resume` applied; a new run has this folder.

    Raises `ConfigError`, and `CheckpointError` if the checkpoint that `resume` names is incomplete.
    """
    run: Any = OmegaConf.to_container(composed.hydra.run, resolve=False)
    text = str(run["dir"] or "").strip()
    expect(bool(text), "hydra.run.dir", "", "a folder; the value is empty, as that of an unset variable of the shell")
    given = None if "${" in text else Path(text)

    settings = compose.prepare(composed)
    mode: Mode = settings.mode
    anew = not sweep or settings.resume == resume.NEVER
    expect(anew, "resume", settings.resume, "never in a sweep, whose jobs are new runs")
    named = mode.trains and settings.resume not in (resume.AUTO, resume.NEVER)
    # Before any of its files is read: another process may replace them in the meantime.
    seen = resume.state_of(resume.run_named(settings.resume) if named else folder)
    if mode in PREVIEWS:
        if f"mode={Mode.sft.name}" in settings.hydra.overrides.task:  # `mode=sft … mode=plan`
            settings.mode = Mode.sft
        resumption = resume.resume_preview(settings, folder)
        given = given if resumption.folder == folder else resumption.folder
    elif mode.trains:
        resumption = resume.resume_training(settings, folder)
    elif mode is Mode.eval:
        resumption = resume.resume_evaluation(settings, folder)
    else:
        if mode is Mode.parity:
            expect(settings.resume == resume.NEVER, "resume", settings.resume, "never with mode=parity")
            resume.require_unused(folder, mode)
        resumption = resume.Resumption(settings, folder)

    config = compose.resolve(resumption.settings)
    return Job(config.mode if mode not in PREVIEWS else mode, config, resumption, given, seen)

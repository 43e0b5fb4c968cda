"""The folder of a run, while this process writes into it.

Invariants:
- Nothing in the folder changes before this process holds its lock.
- What the mode started has ended when the lock is released, or soon after this process was killed.
- No mode overwrites or deletes the results of another run: the folder is unused, or the run in it is resumed, or it
  ended before its first checkpoint and its records are set aside.
- While the lock is held, all records go to `logs/driver.log` there. Warnings and errors go to the terminal, alongside
  the lines of `app.tracking.console` (`conf/hydra/job_logging/rich.yaml`).
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from app.checkpoint.folder import best, latest, step_of
from app.checkpoint.run_state import read_state
from app.cluster.process_reaper import process_reaper
from app.config import RunConfig
from app.config.command_line import command, names_of, override
from app.errors import CheckpointError, RunError, echo
from app.recovery import saved_config
from app.recovery.resume import has_checkpoint, holds_run, state_of
from app.recovery.run_lock import run_lock
from app.start.settle import Job
from app.tracking.run_folder import CONFIG, read_config, set_all_aside
from app.utils.files import replace_file

DRIVER_LOG = Path("logs") / "driver.log"
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
YELLOW, RED, PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


@contextmanager
def output_folder(job: Job, config: RunConfig) -> Iterator[None]:
    """Hold the lock of a run's folder, save its configuration, `config`, in it, and log to it.

    Raises `RunError` if another process has the lock, or has written to the folder since the job was settled.
    """
    folder = job.folder
    with run_lock(folder):
        if state_of(folder) != job.seen:
            raise RunError(f"the run in {folder} was written by another process in the meantime; start again")
        if job.resumption.checkpoint is None and holds_run(folder) and not has_checkpoint(folder):
            moved = set_all_aside(folder)
            echo(f"{folder} holds a run without a checkpoint: it starts over, and its records are now in {moved}")

        save_configuration(job, config.steps)
        # Around the whole mode, so that the dashboards' helpers live until the recorder has closed them.
        with driver_log(folder), process_reaper():
            yield


def save_configuration(job: Job, steps: int) -> None:
    """Write `config/`: Hydra's settings and overrides, of all attempts, and last the configuration to resume with."""
    folder = job.folder / CONFIG
    folder.mkdir(exist_ok=True)
    settings = job.resumption.settings.copy()
    given: Any = OmegaConf.to_container(settings.hydra.overrides.task, resolve=False)  # not values of the environment
    if has_checkpoint(job.folder):
        given = [each for each in read_config(job.folder)[1] if names_of([each])[0] not in names_of(given)] + given
    else:
        replace_file(folder / "hydra.yaml", OmegaConf.to_yaml(OmegaConf.masked_copy(settings, "hydra")))
    replace_file(folder / "overrides.yaml", OmegaConf.to_yaml(given))
    with open_dict(settings):
        del settings["hydra"]
    settings.steps = steps
    saved_config.save(settings, job.folder)


@contextmanager
def driver_log(folder: Path) -> Iterator[None]:
    """Append all log records to `logs/driver.log` of a run's folder."""
    (folder / DRIVER_LOG).parent.mkdir(exist_ok=True)
    handler = DriverLog(folder / DRIVER_LOG, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


class DriverLog(logging.FileHandler):
    """Prints nothing where the disk is full or read-only: the records that matter are on the screen too."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # the records that could not be written are still buffered
            super().close()


class ConsoleWarnings(logging.Handler):
    """Prints `warning: …` or `error: …` to stderr, in color on a terminal, without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        # `sys.stderr` is looked up each time: rich replaces it while a progress bar is shown, to print above the bar.
        try:
            label = "error" if record.levelno >= logging.ERROR else "warning"
            if sys.stderr.isatty():
                label = f"{RED if label == 'error' else YELLOW}{label}{PLAIN}"
            sys.stderr.write(f"{label}: {record.getMessage()}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone; the log file has the record
            self.handleError(record)


def kept_in(folder: Path, continued: Sequence[str] = ()) -> tuple[dict[str, str], dict[str, str | int | float]]:
    """Return lines and facts about what the run in `folder` kept. `continued` are overrides that continue it."""
    lines: dict[str, str] = {}
    facts: dict[str, str | int | float] = {}
    try:
        last, top = latest(folder), best(folder)
        accuracy = read_state(top).accuracy if top is not None else None
    except CheckpointError:  # the run's own error says it, if it matters
        return lines, facts

    if last is not None:
        lines["last"] = facts["checkpoint/last"] = str(last)
    if top is not None and accuracy is not None:
        lines["best"] = f"{top}  (best checkpoint: eval accuracy {accuracy:.1%})"
        facts |= {"checkpoint/best": str(top), "checkpoint/best_step": step_of(top)}
        facts["checkpoint/best_accuracy"] = accuracy
    if last is not None and continued:
        resume = override("resume", folder)
        lines |= {"evaluate": command("mode=eval", resume), "continue": command(resume, *continued)}
    return lines, facts

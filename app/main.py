"""The command: compose → settle (resume applied, one resolve) → check the inputs → hold the folder → run the mode.

An invalid configuration ends with one sentence on stderr and exit code 2, before anything starts (`app/errors.py` lists
the codes). With HYDRA_FULL_ERROR=1 in the environment every error keeps its traceback.
"""

import io
import math
import os
import shutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from app.config import compose
from app.config.arguments import check_arguments
from app.config.command_line import command, override, versions
from app.config.own_data import with_preset
from app.errors import FAILED_EXIT, ConfigError, Interrupted, RunError, echo, exit_code, expect
from app.mode import WRITES, ModeResult, run_mode
from app.recovery.resume import has_checkpoint, holds_run
from app.recovery.run_lock import FolderInUse
from app.start.settle import Job, settle
from app.tracking.run_folder import CONFIG
from app.utils.files import disk_errors, require_writable

FULL_ERROR = "HYDRA_FULL_ERROR"
FULL_ERROR_REQUESTED = FULL_ERROR in os.environ
FAILED_METRIC = -math.inf  # of a job: the sweep continues; Optuna would end the study on NaN
ERRORS = (RunError, HydraException, OmegaConfBaseException)  # the second: of which ConfigError is one


def conf_path() -> str:
    """Return the configuration tree: in the package when installed from a wheel, else next to it in the checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return str(inside if inside.is_dir() else package.parent / "conf")


compose.register()


@hydra.main(version_base="1.3", config_path=conf_path(), config_name="config")
def main(composed: DictConfig) -> float:
    """Run one job and return its metric. Errors leave as `SystemExit`, the only exception that Hydra does not touch."""
    sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    folder = made = Path(HydraConfig.get().runtime.output_dir)  # by Hydra, whatever the mode
    with open_dict(composed):
        composed.hydra = HydraConfig.get()
    try:
        job = settle(composed, made, sweep=sweep)
        folder = job.folder
        if not sweep and folder != made:
            remove_empty(made)
        result = run(job)
    except ERRORS as error:
        code = report(error)
        if isinstance(error, RunError) and not isinstance(error, FolderInUse) and has_checkpoint(folder):
            echo(f"resume with: {command(override('resume', folder))}")
        if sweep and not isinstance(error, Interrupted):
            return FAILED_METRIC
        raise SystemExit(code) from None
    except OSError as error:  # a bug; those that reach `cli` are Hydra's
        traceback.print_exception(error)
        raise SystemExit(FAILED_EXIT) from None
    finally:
        if not sweep:  # whose table lists the jobs that were refused
            remove_empty(made)

    if result.exit_code and not sweep:
        raise SystemExit(result.exit_code)
    return result.metric


def run(job: Job) -> ModeResult:
    """Check the inputs of a job, and run its mode in its folder."""
    for note in job.resumption.notes:
        echo(note)
    if job.resumption.accuracy is not None:
        return ModeResult(job.resumption.accuracy)
    if job.mode not in WRITES:
        return run_mode(job.mode, job.config, job.given_folder)

    from app.start.output_folder import output_folder
    from app.start.preflight import preflight

    inputs = preflight(job.config, job.folder, job.resumption.checkpoint)
    with disk_errors(), output_folder(job, inputs.config):
        return run_mode(job.mode, inputs.config, job.folder, inputs)


def remove_empty(folder: Path) -> None:
    """Remove a folder, and its parents, as far as they are empty and were made for this command."""
    with suppress(OSError):
        for each in (folder, *folder.parents):
            if each == SweepEnd.kept or SweepEnd.kept is None:
                return
            each.rmdir()


class SweepEnd(Callback):
    """Refuses the folder of an earlier sweep; at the end prints a table of the runs and writes their report.

    Of a single run it notes which folder was there before Hydra makes that of the run.
    """

    kept: ClassVar[Path | None] = None  # the folder, or the nearest above it, that this command has not made
    before: tuple[Path, ...] = ()  # folders in that of the sweep
    failed = False  # whether a job of this process failed

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        try:
            if config.mode not in WRITES and "${" in str(config.hydra.run._get_node("dir")._value()):
                with read_write(config.hydra):
                    config.hydra.run.dir = "${hydra:runtime.cwd}"  # so that Hydra makes no folder
                return
            folder = Path(os.path.abspath(str(config.hydra.run.dir)))
            SweepEnd.kept = next(each for each in (folder, *folder.parents) if each.is_dir())
            require_writable("hydra.run.dir", str(folder))
        except OmegaConfBaseException:  # a folder that cannot be resolved is Hydra's to refuse
            return
        except ConfigError as error:
            raise SystemExit(report(error)) from None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra would refuse nothing, and each job would be refused on its own."""
        try:
            require_writable("hydra.sweep.dir", str(config.hydra.sweep.dir or ""))
            folder = Path(str(config.hydra.sweep.dir))
            there = [each for each in folder.glob("*") if each.is_dir()]
            self.before = tuple(each for each in there if not (each / CONFIG).is_dir())  # of no job
            used = any(map(holds_run, there))
            expect(not used, "hydra.sweep.dir", folder, "another folder; it already holds the runs of a sweep")
        except ERRORS as error:  # Hydra would only warn of an error in a callback
            raise SystemExit(report(error)) from None

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        self.failed |= job_return._return_value == FAILED_METRIC

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        from app.mode.report import end_sweep

        folder = Path(str(config.hydra.sweep.dir))
        lines, finished = end_sweep(folder, self.before)
        if lines:
            echo("\n".join(lines))
        elif all(file.name == "multirun.yaml" for file in folder.rglob("*") if file.is_file()):
            shutil.rmtree(folder, ignore_errors=True)  # plans write nothing; the folder and this file are Hydra's
        if self.failed or not finished:
            raise SystemExit(FAILED_EXIT)


def report(error: Exception) -> int:
    """Write why the command ends and return its exit code."""
    if FULL_ERROR_REQUESTED:
        traceback.print_exception(error)
    ended = error if isinstance(error, ConfigError | RunError) else compose.config_error(error)
    echo(ended)
    return exit_code(ended)


def cli() -> None:
    """Entry point of `python -m app` and of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a locale without "→" that character becomes "?", not an error
        sys.stdout.reconfigure(errors="replace")
    os.environ.setdefault(FULL_ERROR, "1")  # Hydra then raises composition errors instead of printing them
    try:
        sys.argv[1:] = with_preset(check_arguments(sys.argv[1:]))
        if "--version" in sys.argv:
            sys.stdout.write(f"{versions()}\n")
            return
        with disk_errors():
            main()
    except BrokenPipeError:  # `--help | head`: nothing more can be written, also not at Python's exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(FAILED_EXIT) from None
    except ERRORS as error:
        raise SystemExit(report(error)) from None
    except OSError as error:
        unwritable = ConfigError("hydra.run.dir", error.filename, "a folder that can be written", error.strerror or "")
        raise SystemExit(report(unwritable)) from None

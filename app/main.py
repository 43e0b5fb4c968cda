"""The command: compose → validate → `run_mode` → return the optimized metric.

An invalid configuration ends with one sentence on stderr and exit code 2, before anything starts (`app/errors.py` lists
the codes). With HYDRA_FULL_ERROR=1 in the environment every error keeps its traceback.
"""

import io
import math
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.config import Mode, RunConfig, compose
from app.config.arguments import check_arguments, named_values
from app.config.command_line import command, override, versions
from app.config.own_data import with_preset
from app.errors import FAILED_EXIT, ConfigError, Interrupted, RunError, echo, exit_code, expect
from app.mode import NOT_GIVEN, PREVIEWS, WRITES, ModeResult, run_mode
from app.recovery.run_lock import FolderInUse
from app.run_report import RunReport, report, reports
from app.utils.files import disk_errors, require_writable

FULL_ERROR = "HYDRA_FULL_ERROR"
FULL_ERROR_REQUESTED = FULL_ERROR in os.environ


def conf_path() -> str:
    """Return the configuration tree: in the package when installed from a wheel, else next to it in the checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return str(inside if inside.is_dir() else package.parent / "conf")


compose.register()


class Validate(Callback):
    """Rejects a configuration before its output folder exists; runs the modes that have no folder of their own."""

    job_failed = False  # of a sweep, in this process

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        try:
            self._start(config)
        except (ConfigError, RunError, OmegaConfBaseException) as error:  # the last: hydra.run.dir=${oc.env:UNSET}
            raise _ended_by(error) from None
        except Exception as error:  # a bug: Hydra would only warn and start the run
            traceback.print_exception(error)
            raise SystemExit(FAILED_EXIT) from None

    def _start(self, composed: DictConfig) -> None:
        mode = _mode(composed, composed.hydra.overrides.task)
        config = compose.resolve(composed)
        HydraConfig.instance().set_config(composed)  # hydra.run.dir may contain ${hydra:…}
        given = _given_folder(composed)
        require_text("hydra.run.dir", given, "a folder")
        require_text("tracking.project", config.tracking.project, "a name")
        if mode in PREVIEWS:
            from app.recovery.resume import apply_preview

            apply_preview(composed)
            config = compose.resolve(composed)
        if mode not in WRITES:
            result = run_mode(mode, config, Path(given))
            _report(result, None if given == NOT_GIVEN else given)
            raise SystemExit(result.exit_code)

        checkpoint = _apply_resume(composed, config)
        config = compose.resolve(composed)

        from app.start.preflight import preflight

        preflight(config, str(composed.hydra.run.dir or ""), checkpoint)
        composed.steps = config.steps  # of the epochs

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse the folder of an earlier sweep, whose jobs would be refused one by one."""
        from app.recovery.resume import holds_run

        if reports():
            why = "app.run runs one job; start a sweep from the command line"
            raise _ended_by(ConfigError("--multirun", "", reason=why))

        try:
            require_writable("hydra.sweep.dir", str(config.hydra.sweep.dir or ""))
            require_text("tracking.project", config.tracking.project, "a name")
            folder = Path(str(config.hydra.sweep.dir))
            used = folder.is_dir() and any(holds_run(each) for each in folder.iterdir() if each.is_dir())
            expect(not used, "hydra.sweep.dir", folder, "another folder; it already holds the runs of a sweep")
        except (ConfigError, OmegaConfBaseException) as error:
            raise _ended_by(error) from None

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print a table of the sweep's runs, and write their report and tables."""
        from app.mode.report import end_sweep

        folder = Path(str(config.hydra.sweep.dir))
        if lines := end_sweep(folder):
            echo("\n".join(lines))
        elif all(file.name == "multirun.yaml" for file in folder.rglob("*") if file.is_file()):
            shutil.rmtree(folder, ignore_errors=True)  # plans write nothing; the folder and this file are Hydra's
        if self.job_failed:
            raise SystemExit(FAILED_EXIT)


@hydra.main(version_base="1.3", config_path=conf_path(), config_name="config")
def main(composed: DictConfig) -> float:
    """Run one job. Errors leave as `SystemExit`, the only exception that Hydra does not touch."""
    multirun = HydraConfig.get().mode is RunMode.MULTIRUN
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        mode = _mode(composed, HydraConfig.get().overrides.task)
        config = compose.resolve(composed)
        if multirun:
            expect(config.resume == "never", "resume", config.resume, "never in a sweep, whose jobs all start anew")
            if config.mode.trains and config.epochs is not None:
                from app.start.preflight import preflight

                preflight(config)
                composed.steps = config.steps
        result = _run(mode, composed, config, folder)
    except (RunError, ConfigError) as error:
        _print_traceback(error)
        echo(error)
        if not isinstance(error, FolderInUse):
            _say_how_to_resume(folder)
        if multirun and not isinstance(error, Interrupted):
            Validate.job_failed = True
            return -math.inf  # the sweep continues; Optuna would end the study on NaN
        report(RunReport(str(folder), exit_code=exit_code(error), error=error.args))
        raise SystemExit(exit_code(error)) from None

    _report(result, folder)
    if result.exit_code and not multirun:
        raise SystemExit(result.exit_code)
    return result.metric


def cli() -> None:
    """Entry point of `python -m app` and of the console script."""
    if "-sc" in sys.argv and (completions := named_values(os.environ.get("COMP_LINE", ""))):
        sys.stdout.write("\n".join(completions) + "\n")
        return

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
    except (RunError, HydraException, OmegaConfBaseException) as error:  # the first: Hydra could not make the folder
        raise _ended_by(error) from None


def _ended_by(error: RunError | HydraException | OmegaConfBaseException) -> SystemExit:
    """Write why the command ends before it has run anything, and return its exit."""
    _print_traceback(error)
    ended = error if isinstance(error, ConfigError | RunError) else compose.config_error(error)
    echo(ended)
    report(RunReport(exit_code=exit_code(ended), error=ended.args))
    return SystemExit(exit_code(ended))


def _print_traceback(error: Exception) -> None:
    """Write an error's traceback if HYDRA_FULL_ERROR is set. Its sentence follows in any case."""
    if FULL_ERROR_REQUESTED:
        traceback.print_exception(error)


def _report(result: ModeResult, folder: Path | str | None) -> None:
    report(RunReport(None if folder is None else str(folder), result.metric, result.exit_code))


def _mode(composed: DictConfig, overrides: Sequence[str]) -> Mode:
    """Return the mode that is run. A preview of `mode=sft` (`mode=sft … mode=plan`) sees the mode that it previews."""
    mode: Mode = composed.mode
    if mode in PREVIEWS and f"mode={Mode.sft.name}" in overrides:
        composed.mode = Mode.sft
    return mode


def _run(mode: Mode, composed: DictConfig, config: RunConfig, folder: Path) -> ModeResult:
    """Run the mode, in its folder if it writes."""
    if mode not in WRITES:
        return run_mode(mode, config, folder)

    from app.start.output_folder import output_folder

    with disk_errors(), output_folder(composed, config, folder):
        return run_mode(mode, config, folder)


def _apply_resume(composed: DictConfig, config: RunConfig) -> Path | None:
    """Take over the configuration of the run that `resume=` names; exit when a run to resume has no step left.

    Returns:
        The checkpoint to start from, if there is one.
    """
    from app.recovery import resume

    if config.mode.trains:
        resumption = resume.apply_resume(composed)
    elif config.mode is Mode.eval:
        resumption = resume.apply_evaluation(composed)
    else:
        expect(config.resume == resume.NEVER, "resume", config.resume, f"never with mode={config.mode.name}")
        resume.require_unused(Path(str(composed.hydra.run.dir)))
        return None

    for note in resumption.notes:
        echo(note)
    if resumption.finished:
        _report(ModeResult(resumption.accuracy), str(composed.hydra.run.dir))
        raise SystemExit(0)
    return resumption.checkpoint


def _say_how_to_resume(folder: Path) -> None:
    from app.checkpoint.folder import FOLDER, LATEST

    if (folder / FOLDER / LATEST).exists():
        echo(f"resume with: {command(override('resume', folder))}")


def require_text(key: str, value: str | None, accepted: str) -> None:
    """Raise `ConfigError` for an empty value, which a shell makes of an unset variable: `hydra.run.dir=$DIR`."""
    expect(bool(str(value or "").strip()), key, value, f"{accepted}; the value is empty")


def _given_folder(composed: DictConfig) -> str:
    """Return `hydra.run.dir` as given. The default names the folder of a new run, so it counts as not given."""
    run: Any = OmegaConf.to_container(composed.hydra.run, resolve=False)
    given = str(run["dir"] or "")
    return NOT_GIVEN if "${" in given else given

"""The command: compose → validate → build → run → return the optimised metric.

A configuration error is one sentence on stderr and exit code 2; a run that fails ends with code 1, one that was
interrupted with 130. With HYDRA_FULL_ERROR=1 in the environment every error keeps its traceback.
"""

import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.config import Mode, RunConfig
from app.config import compose as configuration
from app.errors import ConfigError, Interrupted, RunError, expect

CONFIG_EXIT, FAILED_EXIT, INTERRUPTED_EXIT = 2, 1, 130
FULL_ERROR = "HYDRA_FULL_ERROR"
FULL_ERROR_WANTED = FULL_ERROR in os.environ


def conf_path() -> str:
    """The configuration tree: inside the package when installed from a wheel, else beside it in the checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return str(inside if inside.is_dir() else package.parent / "conf")


configuration.register()


class Validate(Callback):
    """Refuses a configuration before its output folder exists; answers the modes that write nothing."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        try:
            configuration.resolve(config)
            _continue(config)
            resolved = configuration.resolve(config)
            if (code := _answer(resolved)) is not None:
                raise SystemExit(code)
            if resolved.mode is Mode.report:
                _report(config)
            if resolved.mode is Mode.export:
                _export(resolved, config)
            from app.mode.preflight import prepare
            from app.reward.scorer import require

            prepare(resolved, status=lambda _: None)
            require(resolved.reward)
        except (ConfigError, RunError) as error:
            say(error)
            raise SystemExit(exit_code(error)) from None
        except Exception as error:  # a bug: Hydra would warn of it and start the run
            traceback.print_exception(error)
            raise SystemExit(FAILED_EXIT) from None

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """A table over the runs of a sweep."""
        from app.tracking.report.sweep import table

        folder = Path(str(config.hydra.sweep.dir))
        if any(folder.glob("*/summary.json")):
            say(table(folder))


@hydra.main(version_base="1.3", config_path=conf_path(), config_name="config")
def main(composed: DictConfig) -> float:
    """One job. What ends it with a sentence leaves as `SystemExit`, which Hydra lets through untouched."""
    try:
        config = configuration.resolve(composed)
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            expect(config.resume == "never", "resume", config.resume, "never in a sweep, whose jobs all begin anew")
        if (code := _answer(config)) is not None:  # in a sweep, whose jobs have no `on_run_start`
            return float(code)
        folder = Path(HydraConfig.get().runtime.output_dir)
        if config.mode is Mode.parity:
            from app.mode.parity.compare import compare

            return _parity(*compare(config, folder))
        if config.mode is Mode.export:  # in a sweep
            from app.mode.export import export_run

            say(str(export_run(config, folder)))
            return 0.0
        from app.mode.train import run

        return run(config, folder)
    except (RunError, ConfigError) as error:
        if FULL_ERROR_WANTED:
            raise
        say(error)
        _say_how_to_go_on()
        if HydraConfig.get().mode is RunMode.MULTIRUN and not isinstance(error, Interrupted):
            return -math.inf  # the other jobs of the sweep go on; Optuna ends a study that is told NaN
        raise SystemExit(exit_code(error)) from None


def _parity(text: str, worst: float, passed: bool) -> float:
    """The worst error as a share of what is allowed; a job that does not pass ends with code 1, but not its sweep."""
    sys.stdout.write(text + "\n")
    if not passed and HydraConfig.get().mode is not RunMode.MULTIRUN:
        raise SystemExit(FAILED_EXIT)
    return worst


def exit_code(error: Exception) -> int:
    if isinstance(error, Interrupted):
        return INTERRUPTED_EXIT
    return FAILED_EXIT if isinstance(error, RunError) else CONFIG_EXIT


def say(error: Exception | str) -> None:
    """The last line of a run that ends with a sentence."""
    sys.stderr.write(f"{error}\n")


def cli() -> None:
    """Entry point of `python -m app` and of the console script."""
    os.environ.setdefault(FULL_ERROR, "1")  # Hydra hands composition errors to us instead of printing them
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if FULL_ERROR_WANTED:
            raise
        say(configuration.sentence(error))
        raise SystemExit(CONFIG_EXIT) from None


def _answer(config: RunConfig) -> int | None:
    """The exit code of a mode that starts and writes nothing, after it was answered; None: the mode is another."""
    if config.mode is Mode.plan:
        from app.mode.plan.describe import describe

        sys.stdout.write(describe(config) + "\n")
        return 0
    if config.mode is Mode.doctor:
        from app.mode.doctor.check import report

        text, code = report(config)
        sys.stdout.write(text + "\n")
        return code
    return None


def _continue(composed: DictConfig) -> None:
    """Take over the configuration of the run that is resumed; leaves if that has nothing left to do."""
    if composed.mode != Mode.train:
        return
    from app.recovery.resume import apply_resume, finished_at

    for sentence in apply_resume(composed):
        say(sentence)
    step = finished_at(composed)
    if step is not None:
        say(f"the run in {composed.hydra.run.dir} is finished at step {step}: give steps=… above that to go on.")
        raise SystemExit(0)


def _say_how_to_go_on() -> None:
    from app.checkpoint.manager import FOLDER, LATEST

    folder = Path(HydraConfig.get().runtime.output_dir)
    if (folder / FOLDER / LATEST).exists():
        say(f"go on with: python -m app resume={folder}")


def _report(composed: DictConfig) -> None:
    """Write the report of the run or sweep in `hydra.run.dir`, say where it is, and leave."""
    from app.tracking.report.page import report_below

    folder = _given_folder(composed)
    try:
        say(str(report_below(Path(folder))))
    except ValueError as error:
        raise ConfigError(
            f"hydra.run.dir={folder} is not accepted: give a run's or a sweep's folder; {error}."
        ) from None
    raise SystemExit(0)


def _export(config: RunConfig, composed: DictConfig) -> None:
    """Export the run in `hydra.run.dir` or at `resume=<path>`, say where it is, and leave; nothing else is written."""
    from app.mode.export import export_run

    say(str(export_run(config, Path(_given_folder(composed)))))
    raise SystemExit(0)


def _given_folder(composed: DictConfig) -> str:
    """`hydra.run.dir` as it was given, or a path that is none: the default of a new run names no existing folder."""
    given: str = OmegaConf.to_container(composed.hydra.run, resolve=False)["dir"]  # type: ignore[index,call-overload]
    return "<not given>" if "${" in given else given

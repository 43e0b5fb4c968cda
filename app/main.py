"""The command: compose → validate → `MODES[mode].run` → return the optimized metric.

An invalid configuration ends with one sentence on stderr and exit code 2, before anything starts (`app/errors.py` lists
the codes). With HYDRA_FULL_ERROR=1 in the environment every error keeps its traceback.
"""

import math
import os
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

from app.config import Mode, compose
from app.errors import CONFIG_EXIT, FAILED_EXIT, ConfigError, Interrupted, RunError, exit_code, expect, say
from app.mode import MODES

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

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        try:
            self._start(config)
        except (ConfigError, RunError) as error:
            say(error)
            raise SystemExit(exit_code(error)) from None
        except Exception as error:  # a bug: Hydra would only warn and start the run
            traceback.print_exception(error)
            raise SystemExit(FAILED_EXIT) from None

    def _start(self, composed: DictConfig) -> None:
        config = compose.resolve(composed)
        if config.mode is Mode.train:
            _apply_resume(composed)
            config = compose.resolve(composed)

        if not MODES[config.mode].writes:
            raise SystemExit(MODES[config.mode].run(config, Path(_given_folder(composed))).exit_code)

        from app.mode.preflight import preflight

        preflight(config)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print a table of the sweep's runs."""
        from app.tracking.report.sweep import table

        folder = Path(str(config.hydra.sweep.dir))
        if any(folder.glob("*/summary.json")):
            say(table(folder))


@hydra.main(version_base="1.3", config_path=conf_path(), config_name="config")
def main(composed: DictConfig) -> float:
    """Run one job. Errors leave as `SystemExit`, the only exception that Hydra does not touch."""
    multirun = HydraConfig.get().mode is RunMode.MULTIRUN
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        config = compose.resolve(composed)
        if multirun:
            expect(config.resume == "never", "resume", config.resume, "never in a sweep, whose jobs all start anew")
        result = MODES[config.mode].run(config, folder)
    except (RunError, ConfigError) as error:
        if FULL_ERROR_REQUESTED:
            raise
        say(error)
        _say_how_to_resume(folder)
        if multirun and not isinstance(error, Interrupted):
            return -math.inf  # the sweep continues; Optuna would end the study on NaN
        raise SystemExit(exit_code(error)) from None

    if result.exit_code and not multirun:
        raise SystemExit(result.exit_code)
    return result.metric


def cli() -> None:
    """Entry point of `python -m app` and of the console script."""
    os.environ.setdefault(FULL_ERROR, "1")  # Hydra then raises composition errors instead of printing them
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if FULL_ERROR_REQUESTED:
            raise
        say(compose.one_sentence(error))
        raise SystemExit(CONFIG_EXIT) from None


def _apply_resume(composed: DictConfig) -> None:
    """Take over the configuration of the run to resume; exit when that run has no step left."""
    from app.recovery.resume import apply_resume, finished_at

    for sentence in apply_resume(composed):
        say(sentence)

    step = finished_at(composed)
    if step is not None:
        say(f"the run in {composed.hydra.run.dir} finished at step {step}: give a larger steps=… to continue it.")
        raise SystemExit(0)


def _say_how_to_resume(folder: Path) -> None:
    from app.checkpoint.manager import FOLDER, LATEST

    if (folder / FOLDER / LATEST).exists():
        say(f"resume with: python -m app resume={folder}")


def _given_folder(composed: DictConfig) -> str:
    """Return `hydra.run.dir` as given. The default names the folder of a new run, so it counts as not given."""
    run: Any = OmegaConf.to_container(composed.hydra.run, resolve=False)
    given: str = run["dir"]
    return "<not given>" if "${" in given else given

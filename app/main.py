"""The command: compose → validate → build → run → return the optimised metric.

A configuration error is one sentence on stderr and exit code 2; a run that fails ends with code 1, one that was
interrupted with 130. With HYDRA_FULL_ERROR=1 in the environment every error keeps its traceback.
"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from app import config as configuration
from app.config import Mode, RunConfig
from app.errors import ConfigError, Interrupted, RunError

CONFIG_EXIT, FAILED_EXIT, INTERRUPTED_EXIT = 2, 1, 130
FULL_ERROR = "HYDRA_FULL_ERROR"


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
            resolved = configuration.resolve(config)
            _refuse_unbuilt(resolved)
            if resolved.mode is Mode.plan:
                from app.placement.plan import describe

                print(describe(resolved))
                raise SystemExit(0)
        except ConfigError as error:
            print(error, file=sys.stderr)
            raise SystemExit(CONFIG_EXIT) from None


@hydra.main(version_base="1.3", config_path=conf_path(), config_name="config")
def main(composed: DictConfig) -> float:
    config = configuration.resolve(composed)
    _refuse_unbuilt(config)
    from app.placement.build import run

    return run(config, Path(HydraConfig.get().runtime.output_dir))


def cli() -> None:
    """Entry point of `python -m app` and of the console script."""
    traceback_wanted = FULL_ERROR in os.environ
    os.environ.setdefault(FULL_ERROR, "1")  # Hydra hands errors to us instead of printing them
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if traceback_wanted:
            raise
        print(configuration.sentence(error), file=sys.stderr)
        raise SystemExit(CONFIG_EXIT) from None
    except Interrupted as error:
        print(error, file=sys.stderr)
        raise SystemExit(INTERRUPTED_EXIT) from None
    except RunError as error:
        if traceback_wanted:
            raise
        print(error, file=sys.stderr)
        raise SystemExit(FAILED_EXIT) from None


def _refuse_unbuilt(config: RunConfig) -> None:
    """What the design names and a later change brings: one sentence until then."""
    from app.placement.unbuilt import refuse

    refuse(config)

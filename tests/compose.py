"""Composes configurations in tests as the command line would."""

from copy import deepcopy
from functools import cache

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from app.config import RunConfig
from app.config import compose as configuration
from app.main import conf_path
from app.start.inputs import CheckStage, RunInputs
from app.start.preflight import problems


def composed(*overrides: str) -> RunConfig:
    """The resolved configuration of `python -m app <overrides>`, for the caller to change."""
    return deepcopy(_composed(overrides))


def problems_of(*overrides: str) -> dict[str, str]:
    """What a plan of `python -m app <overrides>` says that a run on this machine would refuse."""
    return problems(RunInputs(composed(*overrides), CheckStage.plan))


def jobs_of(overrides: list[str], *, multirun: bool) -> list[list[str]]:
    """The overrides of each job of a command line; one job without a sweep."""
    if any(each.startswith("sweep=") for each in overrides):
        configuration.register()
        with initialize_config_dir(conf_path(), version_base="1.3"):
            sweep = compose("config", overrides=overrides, return_hydra_config=True)
        assert sweep.hydra.mode.name == "MULTIRUN"
        swept = [f"{key}={values}" for key, values in sweep.hydra.sweeper.params.items()]
        overrides = [*swept, *(each for each in overrides if each.split("=")[0] not in sweep.hydra.sweeper.params)]
    elif not multirun:
        return [overrides]

    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)
    return [list(job) for job in jobs]


@cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    with initialize_config_dir(conf_path(), version_base="1.3"):
        return configuration.resolve(
            configuration.prepare(compose("config", overrides=list(overrides), return_hydra_config=True))
        )

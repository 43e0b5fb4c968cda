"""Composes configurations in tests as the command line would."""

from copy import deepcopy
from functools import cache

from hydra import compose, initialize_config_dir

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


@cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    with initialize_config_dir(conf_path(), version_base="1.3"):
        return configuration.resolve(
            configuration.prepare(compose("config", overrides=list(overrides), return_hydra_config=True))
        )

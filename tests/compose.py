"""Composes configurations in tests as the command line would."""

from copy import deepcopy
from functools import cache

from hydra import compose, initialize_config_dir

from app.config import RunConfig
from app.config import compose as configuration
from app.main import conf_path


def composed(*overrides: str) -> RunConfig:
    """The resolved configuration of `python -m app <overrides>`, for the caller to change."""
    return deepcopy(_composed(overrides))


@cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    with initialize_config_dir(conf_path(), version_base="1.3"):
        return configuration.resolve(compose("config", overrides=list(overrides), return_hydra_config=True))

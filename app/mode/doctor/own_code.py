"""Checks of the user's own reward and trackers: can they be imported?"""

from collections.abc import Iterator
from dataclasses import replace

from app.config import RunConfig
from app.errors import ConfigError
from app.mode.doctor.finding import Check, CheckStatus
from app.reward.tryout import try_out
from app.tracking.own_tracker import require_trackers


def own_code(config: RunConfig) -> Iterator[Check]:
    """Load what `reward.*._target_` and `tracking.use` name. A run also tries the reward on rows of its data."""
    targets = [term.target for term in config.reward.terms().values() if term.target is not None]
    if targets:
        yield _reward(config, ", ".join(targets))
    if config.tracking.own:
        yield _trackers(config)


def _reward(config: RunConfig, targets: str) -> Check:
    try:
        try_out(replace(config.reward, tryout=False), [], lambda _: [])
    except ConfigError as error:
        return Check("reward", CheckStatus.fail, str(error), "correct the path, or set PYTHONPATH to its folder")
    return Check("reward", CheckStatus.ok, f"{targets} can be loaded")


def _trackers(config: RunConfig) -> Check:
    try:
        require_trackers(config.tracking)
    except ConfigError as error:
        return Check("tracker", CheckStatus.fail, str(error), "correct the path, or set PYTHONPATH to its folder")
    return Check("tracker", CheckStatus.ok, f"{', '.join(config.tracking.own)} can be loaded")

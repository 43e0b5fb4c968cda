"""A transport of the user's own, `weight_sync._target_`: a class with what `Transport` (transport/base.py) has."""

from collections.abc import Callable
from typing import Any

from app.config.weight_sync import WeightSyncConfig
from app.errors import ConfigError, expect
from app.utils.dotted_path import LoadError, resolve_own

NEEDED = ("sender", "route", "connect", "request_body", "abort")
KEY = "weight_sync._target_"


def own_transport(config: WeightSyncConfig) -> Callable[..., Any] | None:
    """Return the class of `weight_sync._target_`; None without one.

    Raises:
        ConfigError: It cannot be imported, or is no transport.
    """
    target = config._target_
    if target is None:
        return None

    accepted = f"the path of a class with {', '.join(NEEDED)}"
    try:
        found = resolve_own(target)
    except LoadError as error:
        raise ConfigError(KEY, target, accepted, str(error)) from error
    missing = [name for name in NEEDED if not hasattr(found, name)]
    expect(not missing, KEY, target, f"{accepted}; it lacks {', '.join(missing)}")
    return found

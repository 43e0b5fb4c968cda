"""A transport of the user's own, `weight_sync._target_`: a class with what `Transport` (transport/base.py) has."""

from app.config.weight_sync import WeightSyncConfig
from app.errors import expect
from app.utils.dotted_path import problem_of

NEEDED = ("sender", "route", "connect", "request_body", "abort")


def require_transport(config: WeightSyncConfig) -> None:
    """Raise `ConfigError` if the class of `weight_sync._target_` cannot be imported, or is no transport."""
    target = config._target_
    problem = None if target is None else problem_of(target, _problem)
    accepted = f"the path of a class with {', '.join(NEEDED)}"
    expect(problem is None, "weight_sync._target_", target, f"{accepted}; {problem}")


def _problem(found: object) -> str | None:
    missing = [name for name in NEEDED if not hasattr(found, name)]
    return f"it lacks {', '.join(missing)}" if missing else None

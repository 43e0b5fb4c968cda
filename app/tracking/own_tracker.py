"""A tracker of the user's own, named by its dotted path in `tracking.use`.

    # my_tracker.py, in the working directory or anywhere else on PYTHONPATH
    class MyTracker:
        def __init__(self, run, **args): ...          # run: DashboardOptions; args: tracking.args
        def log(self, step, metrics): ...             # names to finite numbers
        def alert(self, step, title, text): ...       # optional
        def samples(self, step, kind, rows): ...      # optional; kind: "step" or "eval"
        def close(self, status): ...                  # optional; finished, interrupted or failed

All calls come from one thread of its own, in order. They may block and raise: see `app/tracking/dashboards.py`.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from app.config.tracking import TrackingConfig
from app.errors import expect
from app.utils.dotted_path import problem_of


def require_trackers(config: TrackingConfig) -> None:
    """Raise `ConfigError` if a tracker of the user's own cannot be imported or constructed with `tracking.args`."""
    for path in config.own:
        problem = problem_of(path, partial(_problem, config.args))
        accepted = "the path of a class that can be called with a run and tracking.args, and has a method log"
        expect(problem is None, "tracking.use", path, f"{accepted}; {problem}")


def _problem(args: Mapping[str, Any], made: Callable[..., Any]) -> str | None:
    inspect.signature(made).bind(None, **args)
    lacks = inspect.isclass(made) and not callable(getattr(made, "log", None))
    return "it has no method log" if lacks else None

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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from app.config.tracking import TrackingConfig
from app.errors import expect
from app.tracking.dashboard import DashboardOptions
from app.utils.dotted_path import problem_of, resolve_own


class OwnTracker:
    """An open run in a tracker of the user's own. Methods that it lacks are skipped."""

    def __init__(self, path: str, options: DashboardOptions) -> None:
        self._tracker: Any = resolve_own(path)(options, **options.args)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(step, metrics)

    def alert(self, step: int, title: str, text: str) -> None:
        self._optional("alert", step, title, text)

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._optional("samples", step, name, rows)

    def close(self, status: str) -> None:
        self._optional("close", status)

    def _optional(self, method: str, *arguments: object) -> None:
        if hasattr(self._tracker, method):
            getattr(self._tracker, method)(*arguments)


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

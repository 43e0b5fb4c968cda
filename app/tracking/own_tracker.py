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
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.config.tracking import TrackingConfig
from app.errors import ConfigError
from app.tracking.dashboard import DashboardOptions
from app.utils.dotted_path import LoadError, error_text, resolve_own

IMPORT_LIMIT_S = 60.0


class OwnTracker:
    """An open run in a tracker of the user's own. Methods that it lacks are skipped."""

    def __init__(self, path: str, options: DashboardOptions) -> None:
        self._tracker: Any = resolve_own(path)(options, **options.args)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(step, metrics)

    def alert(self, step: int, title: str, text: str) -> None:
        self._optional("alert")(step, title, text)

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._optional("samples")(step, name, rows)

    def close(self, status: str) -> None:
        self._optional("close")(status)

    def _optional(self, method: str) -> Callable[..., None]:
        return getattr(self._tracker, method, _nothing)


def require_trackers(config: TrackingConfig) -> None:
    """Raise `ConfigError` if a tracker of the user's own cannot be imported or constructed with `tracking.args`."""
    for path in config.own:
        problem = _problem_in_time(path, config.args)
        if problem is not None:
            accepted = "the path of a class that can be called with a run and tracking.args, and has a method log"
            raise ConfigError("tracking.use", path, accepted, problem)


def _problem_in_time(path: str, args: Mapping[str, Any]) -> str | None:
    """Look for a problem on a thread: the import of the user's module may hang."""
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_problem(path, args)), name=f"import {path}", daemon=True)
    thread.start()
    thread.join(IMPORT_LIMIT_S)
    return found[0] if found else f"its module was not imported within {IMPORT_LIMIT_S:g} s"


def _problem(path: str, args: Mapping[str, Any]) -> str | None:
    try:
        made = resolve_own(path)
        inspect.signature(made).bind(None, **args)
    except LoadError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # custom modules can raise anything
        return error_text(error)
    if inspect.isclass(made) and not callable(getattr(made, "log", None)):
        return "it has no method log"
    return None


def _nothing(*_: object) -> None:
    """Stands for a method that the tracker does not have."""

"""ClearML: a task with the resolved configuration as hyper-parameters, scalars, and alarms in its console.

Credentials come from the environment (`CLEARML_API_ACCESS_KEY` …) or ClearML's own file. `tracking.offline=true` or
`CLEARML_OFFLINE_MODE=1` keep the session in ClearML's cache and, at the end, as a zip in `tracking/clearml/`;
`Task.import_offline_session` uploads it. Nothing of the process is patched: no streams, frameworks, arguments or seeds.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from typing import Any

from app.tracking.dashboard import DashboardOptions, Progress


class ClearML:
    """A resumed run continues its task; offline, where ClearML cannot, it is a session of its own."""

    def __init__(self, start: DashboardOptions) -> None:
        from clearml import Task

        offline = start.offline or os.environ.get("CLEARML_OFFLINE_MODE", "0") not in ("", "0")
        self._folder = start.folder
        self._progress = Progress(start.folder.with_suffix(".json"), resumed=start.resumed_at is not None)
        known = self._progress.run_id
        continued = None if offline or known is None or known.startswith("offline-") else known
        Task.set_offline(offline)
        Task.set_random_seed(None)  # ClearML would seed this process
        setattr(Task, "_report_subprocess_enabled", False)  # noqa: B010  (not in its types) it would fork the driver, and its end would take 10 s
        self._task: Any = Task.init(
            project_name=start.project,
            task_name=start.run_name,
            reuse_last_task_id=False,
            continue_last_task=continued or False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        if continued:
            self._task.set_initial_iteration(0)  # our steps count from the run's start
        self._task.set_parameters(flat(start.config))
        self._logger: Any = self._task.get_logger()
        self._progress.opened(self._task.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._progress.is_new(step):
            return
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            self._logger.report_scalar(title, series, value, step)
        self._progress.sent(step)

    def alert(self, step: int, title: str, text: str) -> None:
        self._logger.report_text(f"step {step}: {title}: {text}", level=logging.WARNING, print_console=False)

    def close(self, status: str) -> None:
        if status == "failed":
            self._task.mark_failed(ignore_errors=True, status_reason="the run failed", force=True)
        elif status == "interrupted":
            self._task.mark_stopped(force=True, status_message="interrupted")
        session = self._task.get_offline_mode_folder()
        self._task.close()
        if session is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(session.with_suffix(".zip"), self._folder)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """ClearML's form of a nested configuration: section/name, the rest of the path joined by dots.

    >>> flat({"steps": 3, "model": {"name": "tiny", "tiny": {"heads": 4}}})
    {'run/steps': 3, 'model/name': 'tiny', 'model/tiny.heads': 4}
    """
    parameters: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            parameters.update({f"{name}/{key}": leaf for key, leaf in _leaves(value, "")})
        else:
            parameters[f"run/{name}"] = value
    return parameters


def _leaves(node: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            found += _leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found

"""ClearML: a task with the resolved configuration as hyperparameters, scalars, and alarms in its console.

Credentials come from the environment (`CLEARML_API_ACCESS_KEY` …) or ClearML's own file. `tracking.offline=true` or
`CLEARML_OFFLINE_MODE=1` record offline: the session is in ClearML's cache and becomes a zip in
`tracking/clearml/` at the end; `Task.import_offline_session` uploads it. ClearML's patching of streams, frameworks,
arguments and seeds is off.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from typing import Any

from app.tracking.dashboards import DashboardOptions, Progress
from app.tracking.run_folder import flatten

logger = logging.getLogger(__name__)


class ClearML:
    """A ClearML task. A resumed run continues its task, except offline, where it is a new session.

    The server keeps one value per metric and step, so a resumed run replaces the steps that it sends again.
    """

    def __init__(self, options: DashboardOptions) -> None:
        import clearml.logger
        import clearml.task
        from clearml import Task

        self._folder = options.folder
        self._progress = Progress(options)
        offline = options.offline or os.environ.get("CLEARML_OFFLINE_MODE", "0") not in ("", "0")
        task_id = self._progress.run_id
        if offline or (task_id is not None and task_id.startswith("offline-")):
            task_id = None

        if offline:  # it would print, twice, where the session is that `close` moves
            setattr(clearml.logger, "print", logger.info)  # noqa: B010
            setattr(clearml.task, "print", logger.info)  # noqa: B010
        Task.set_offline(offline)
        Task.set_random_seed(None)  # keeps ClearML from seeding this process
        # Keeps ClearML from forking the driver, which would add 10 s to its exit. The attribute is not in its types.
        setattr(Task, "_report_subprocess_enabled", False)  # noqa: B010
        self._task: Any = Task.init(
            project_name=options.project,
            task_name=options.run_name,
            reuse_last_task_id=False,
            continue_last_task=task_id or False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        if task_id is not None:
            self._task.set_initial_iteration(0)  # our steps are not relative to the resume
        self._task.set_parameters(flat(options.config))
        self._logger: Any = self._task.get_logger()
        self._progress.opened(self._task.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            self._logger.report_scalar(title, series, value, step)

    def alert(self, step: int, title: str, text: str) -> None:
        self._logger.report_text(f"step {step}: {title}: {text}", level=logging.WARNING, print_console=False)

    def close(self, status: str) -> None:
        if status == "failed":
            self._task.mark_failed(ignore_errors=True, status_reason="the run failed", force=True)
        session, task_id = self._task.get_offline_mode_folder(), self._task.id
        self._task.close()  # which marks a task as completed that has not failed
        if status == "interrupted" and session is None:
            from clearml import Task

            Task.get_task(task_id=task_id).mark_stopped(force=True, status_message="interrupted")
        if session is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.move(session.with_suffix(".zip"), self._folder)
            shutil.rmtree(session, ignore_errors=True)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a nested configuration to ClearML's `section/name` keys; deeper keys are joined by dots.

    >>> flat({"steps": 3, "model": {"name": "tiny", "lora": {"rank": 4}}})
    {'run/steps': 3, 'model/name': 'tiny', 'model/lora.rank': 4}
    """
    return {key.replace(".", "/", 1) if "." in key else f"run/{key}": value for key, value in flatten(config).items()}

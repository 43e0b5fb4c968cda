"""`mode=report`: write `report.html` of the run, or of the folder of runs, that `hydra.run.dir` names.

Another process may be writing the run. Its folder is left alone then, and the report is written beside it.
"""

from pathlib import Path

from app.config import RunConfig
from app.errors import ConfigError, say
from app.mode import ModeResult
from app.recovery.run_lock import FolderInUse, run_lock
from app.tracking.report.data import find_runs
from app.tracking.report.page import NAME, write_report


def run(_config: RunConfig, folder: Path) -> ModeResult:
    """Write the report and print its path. Raises `ConfigError` for a folder without runs."""
    runs = find_runs(folder)
    if not runs:
        raise ConfigError(
            f"hydra.run.dir={folder} is not accepted: give a run's or a sweep's folder; a report needs at least one "
            "run folder."
        )

    say(str(_report_of_run(folder) if runs == [folder] else write_report(runs, folder / NAME)))
    return ModeResult()


def _report_of_run(folder: Path) -> Path:
    try:
        with run_lock(folder):
            return write_report([folder], folder / NAME)
    except FolderInUse:
        return write_report([folder], folder.with_name(f"{folder.name}.{NAME}"))

"""`mode=report`: write `report.html` of the run, or of the folder of runs, that `hydra.run.dir` names."""

from pathlib import Path

from app.config import RunConfig
from app.errors import ConfigError, say
from app.mode import ModeResult
from app.tracking.report.page import report_below


def run(_config: RunConfig, folder: Path) -> ModeResult:
    """Write the report and print its path. Raises `ConfigError` for a folder without runs."""
    try:
        say(str(report_below(folder)))
    except ValueError as error:
        raise ConfigError(
            f"hydra.run.dir={folder} is not accepted: give a run's or a sweep's folder; {error}."
        ) from None
    return ModeResult()

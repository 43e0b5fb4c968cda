"""How a command reports its end to `app.run`, which started it in a process of its own."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

REPORT_VARIABLE = "POSTTRAIN_REPORT"  # environment variable: the file for the report


@dataclass(frozen=True, slots=True)
class RunReport:
    """The end of a command: the result of its mode, or its error."""

    folder: str | None = None  # of the run; None: the mode has none
    metric: float = 0.0
    exit_code: int = 0
    error: tuple[str, ...] | None = None  # the arguments of its `ConfigError` or `RunError`


def report(end: RunReport) -> None:
    """Write the report, if this process is to write one."""
    if reports():
        Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(asdict(end)), encoding="utf-8")


def reports() -> bool:
    """Whether `app.run` started this process."""
    return REPORT_VARIABLE in os.environ


def read(file: Path) -> RunReport | None:
    """Return the report in a file; None if the command ended without one."""
    return RunReport(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

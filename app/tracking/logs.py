"""Log handlers of the driver (`conf/hydra/job_logging/rich.yaml`).

All records go to `logs/driver.log`; warnings and errors also go to the terminal, alongside the lines of
`app.tracking.console`.
"""

import logging
import sys
from pathlib import Path

DRIVER_LOG = "driver.log"
YELLOW, RED, PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


class DriverLog(logging.FileHandler):
    """Appends to `<folder>/driver.log`. The first record creates the folder, so a process without logs leaves none."""

    def __init__(self, folder: str) -> None:
        super().__init__(Path(folder) / DRIVER_LOG, encoding="utf-8", delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        super().emit(record)


class ConsoleWarnings(logging.Handler):
    """Prints `warning: …` or `error: …` to stderr, in color on a terminal, without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        # `sys.stderr` is looked up each time: rich replaces it while a progress bar is shown, to print above the bar.
        try:
            label = "error" if record.levelno >= logging.ERROR else "warning"
            if sys.stderr.isatty():
                label = f"{RED if label == 'error' else YELLOW}{label}{PLAIN}"
            sys.stderr.write(f"{label}: {record.getMessage()}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone; the log file has the record
            self.handleError(record)

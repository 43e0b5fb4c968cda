"""Where log records go (`conf/hydra/job_logging/rich.yaml`): all to `logs/driver.log`, warnings to the screen too.

People read the console that `app.tracking.console` draws; the rest of what is said stays in the run's own log. The
handlers find `sys.stderr` anew for each record, so that a progress bar that is on the screen stays at its bottom.
"""

import logging
import sys
from pathlib import Path

DRIVER_LOG = "driver.log"
YELLOW, RED, PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


class DriverLog(logging.FileHandler):
    """Appends to `<folder>/driver.log`. The folder is made by the first record: what logs nothing leaves nothing."""

    def __init__(self, folder: str) -> None:
        super().__init__(Path(folder) / DRIVER_LOG, encoding="utf-8", delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        super().emit(record)


class ConsoleWarnings(logging.Handler):
    """One line on stderr for each warning or error: `warning: …`, in colour on a terminal, without traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            word = "error" if record.levelno >= logging.ERROR else "warning"
            if sys.stderr.isatty():
                word = f"{RED if word == 'error' else YELLOW}{word}{PLAIN}"
            sys.stderr.write(f"{word}: {record.getMessage()}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone; the file has the record
            self.handleError(record)

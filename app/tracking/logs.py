"""Log handlers of the driver.

While a run holds its folder's lock, all records go to `logs/driver.log` there. Warnings and errors go to the terminal,
alongside the lines of `app.tracking.console` (`conf/hydra/job_logging/rich.yaml`).
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DRIVER_LOG = Path("logs") / "driver.log"
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
YELLOW, RED, PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


@contextmanager
def driver_log(folder: Path) -> Iterator[None]:
    """Append all log records to `logs/driver.log` of a run's folder."""
    handler = DriverLog(folder / DRIVER_LOG)
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


class DriverLog(logging.FileHandler):
    """Appends to a file. The first record creates it and its folder, so a process without logs leaves none."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, encoding="utf-8", delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None:
            with suppress(OSError):  # `super().emit` meets it again
                Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Print nothing where the disk is full or read-only: the records that matter are on the screen too."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # the records that could not be written are still buffered
            super().close()


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

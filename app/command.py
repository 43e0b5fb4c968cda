"""The command as a Python function: `app.run(["algorithm=dapo", "steps=3"])`.

It runs in a child process. Hydra, Ray, signal handlers and asyncio have one state per process; a notebook's kernel has
an event loop of its own, and the second run in it would meet what the first one left.

Invariants:
- The child imports what the caller can import, custom rewards included.
- The child does not outlive the caller. When its standard input closes it ends as with SIGTERM, so it saves a training
  run that has checkpoints.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from app.errors import CONFIG_EXIT, INTERRUPTED_EXIT, ConfigError, Interrupted, RunError
from app.run_report import REPORT_VARIABLE, RunReport, read
from app.tracking.run_folder import summary
from app.utils.process import module_command


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a command that ended without an error."""

    folder: Path | None  # of the run; None: the mode has none
    summary: Mapping[str, Any]  # content of `summary.json` in that folder, if there is one
    metric: float  # what a sweep optimizes: the last evaluation accuracy of a training run
    exit_code: int  # 1: a check of mode=doctor or mode=parity failed


def run(arguments: Sequence[str] = ()) -> RunResult:
    """Run one command and wait for it to finish. Its output goes to `sys.stdout`, line by line.

    Args:
        arguments: As on the command line: `["model=tiny", "steps=3"]`.

    Raises:
        ConfigError: A setting is not accepted; nothing was started.
        RunError: The run failed.
        Interrupted: The command received SIGINT or SIGTERM.
        KeyboardInterrupt: This process received SIGINT. The run was saved and stopped, as on Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="posttrain_") as folder:
        file = Path(folder) / "report.json"
        code = _run_command(arguments, file)
        end = read(file)

    if code in (INTERRUPTED_EXIT, -signal.SIGTERM, -signal.SIGINT):
        raise Interrupted("the command was interrupted")

    if end is None and code != 0:
        raise RunError(f"the command ended with exit code {code}; its output says why")
    if end is not None and end.error is not None:
        raise (ConfigError if code == CONFIG_EXIT else RunError)(*end.error)

    return _result(end or RunReport())


def _result(end: RunReport) -> RunResult:
    folder = None if end.folder is None else Path(end.folder).absolute()
    found = {} if folder is None else summary.read(folder)
    return RunResult(folder, found, end.metric, end.exit_code)


def _run_command(arguments: Sequence[str], report: Path) -> int:
    """Run the command in a child process and return its exit code."""
    search_path = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    process = subprocess.Popen(
        [*module_command(__name__), *arguments],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": search_path, REPORT_VARIABLE: str(report)},
        stdin=subprocess.PIPE,  # never written to: it closes when this process ends
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        process_group=0,  # Ctrl-C in a terminal reaches this process only, which closes the pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None

    with process:
        try:
            _show(process.stdout)
        except BaseException:
            process.stdin.close()
            _show(process.stdout)
            raise
    return process.returncode


def _show(output: IO[str]) -> None:
    for line in output:
        sys.stdout.write(line)


def _end_with_caller() -> None:
    """Wait for the end of standard input, whose other end the caller holds."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the command in the child process."""
    from app.main import cli

    threading.Thread(target=_end_with_caller, daemon=True).start()
    cli()


if __name__ == "__main__":
    main()

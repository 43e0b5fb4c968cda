"""`mode=doctor`: check whether this machine can run the configuration. Exit code 1 when a check fails."""

import sys
from pathlib import Path

from app.config import RunConfig
from app.mode import NOT_GIVEN, ModeResult
from app.mode.doctor.check import report
from app.mode.doctor.machine import OUTPUTS
from app.mode.inputs import with_counted_steps


def run(config: RunConfig, folder: Path) -> ModeResult:
    """Print the checks. The metric is the exit code."""
    text, code = report(with_counted_steps(config), Path(OUTPUTS) if str(folder) == NOT_GIVEN else folder)
    sys.stdout.write(text + "\n")
    return ModeResult(float(code), code)

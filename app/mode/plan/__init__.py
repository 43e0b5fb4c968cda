"""`mode=plan`: print the device layout, the batch arithmetic and a memory estimate. Needs no accelerator."""

import sys
from pathlib import Path

from app.config import RunConfig
from app.mode import ModeResult
from app.mode.plan import describe


def run(config: RunConfig, _folder: Path) -> ModeResult:
    """Print the plan."""
    sys.stdout.write(describe.describe(config) + "\n")
    return ModeResult()

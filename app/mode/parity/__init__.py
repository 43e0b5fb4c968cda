"""`mode=parity`: check that trainer, weight sync and engine compute correctly on this device."""

import sys
from pathlib import Path

from app.config import RunConfig
from app.errors import FAILED_EXIT
from app.mode import ModeResult
from app.mode.parity import compare


def run(config: RunConfig, folder: Path) -> ModeResult:
    """Print the comparison. The metric is the worst error as a share of its bound."""
    text, worst, passed = compare.compare(config, folder)
    sys.stdout.write(text + "\n")
    return ModeResult(worst, 0 if passed else FAILED_EXIT)

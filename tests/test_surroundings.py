"""A run in surroundings that a shell, a cluster or an administrator made: each alone, and most of them together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("option", ["--help", "mode=plan"])
def test_characters_that_the_terminal_lacks_end_nothing(option: str) -> None:
    """With `→` in what is printed."""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-m", "app", option], env=environment, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("latin-1")

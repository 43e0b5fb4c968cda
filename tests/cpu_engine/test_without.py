"""A tree without app/cpu_engine/ and its entry point runs as this one does, slower."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_device_without_the_room_forks_no_engines_and_changes_no_rank(tree: Path) -> None:
    code = "from app.device.cpu import DEVICE; print(DEVICE.fork_server, DEVICE.prepare_rank)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "None None\n", done.stderr

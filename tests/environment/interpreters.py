"""Interpreters with packages of their own, built once from the package registry into a cache folder."""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = "POSTTRAIN_TEST_INTERPRETERS"  # an environment variable: where they are kept
BUILD_S = 2400  # limit of a test that builds its interpreters first


def interpreter(*requirements: str) -> Path:
    """Return a Python of this version in which the requirements are installed, and nothing of ours."""
    root = Path(os.environ.get(CACHE) or Path(tempfile.gettempdir()) / "posttrain-interpreters")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = root / hashlib.sha256("\n".join([version, *requirements]).encode()).hexdigest()[:12]
    python, finished = folder / "bin" / "python", folder / "finished"

    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            _run(sys.executable, "-m", "venv", "--clear", str(folder))
            _run(str(python), "-m", "pip", "install", "--quiet", *requirements)
            finished.touch()
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

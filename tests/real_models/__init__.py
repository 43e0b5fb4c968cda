"""Real pretrained models, where a test needs one."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = "POSTTRAIN_REAL_MODELS"  # an environment variable
MAKE_S = 2400


def real_model(name: str) -> Path:
    """Return the directory of a model of `tests.real_models.make`."""
    root = Path(os.environ.get(FOLDER) or Path(tempfile.gettempdir()) / "posttrain-real-models")
    folder = root / name
    if not (folder / "config.json").is_file():
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "config.json").is_file():
                command = [sys.executable, "-m", "tests.real_models.make", name, str(folder)]
                subprocess.run(command, check=True, timeout=MAKE_S)
    return folder

"""Real pretrained models and TRL, where a test needs them."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = "POSTTRAIN_REAL_MODELS"  # an environment variable
TRL_PYTHON = "POSTTRAIN_TRL_PYTHON"  # another: the interpreter of an environment with TRL
TRL = ("torch==2.13.0", "trl==1.16.0", "transformers==5.19.0", "datasets==5.2.0", "peft==0.21.2")
MAKE_S = 2400


def real_model(name: str) -> Path:
    """Return the directory of a model of `tests.real_models.make`."""
    folder = _root() / name
    _once(folder / "config.json", [sys.executable, "-m", "tests.real_models.make", name, str(folder)])
    return folder


def trl_python() -> str:
    """Return the interpreter of an environment with TRL, whose requirements are not those of the application."""
    if TRL_PYTHON in os.environ:
        return os.environ[TRL_PYTHON]
    python = str(_root() / "trl" / "bin" / "python")
    _once(
        _root() / "trl" / "bin" / "trl",
        [sys.executable, "-m", "venv", str(_root() / "trl")],
        [python, "-m", "pip", "-q", "install", *TRL],
    )
    return python


def _root() -> Path:
    root = Path(os.environ.get(FOLDER) or Path(tempfile.gettempdir()) / "posttrain-real-models")
    root.mkdir(parents=True, exist_ok=True)
    return root


def _once(made: Path, *commands: list[str]) -> None:
    """Run commands, of which the last one makes this file at its end, unless it is there."""
    with (_root() / f"{made.relative_to(_root()).parts[0]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            for command in commands:
                subprocess.run(command, check=True, timeout=MAKE_S)

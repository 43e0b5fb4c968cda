"""Runs the launch scripts in a clean environment."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable  # composes what the scripts ask for


def bash(*words: str, cwd: str | Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["bash", *words], cwd=cwd, capture_output=True, text=True, env={**kept, **environment}, timeout=60
    )


def dry_run(script: str, *words: str, **environment: str) -> list[list[str]]:
    """The commands that a script would run, as words."""
    done = bash(str(ROOT / "launch" / script), "--dry-run", *words, **{"PYTHON": PYTHON, **environment})
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def options(command: list[str]) -> dict[str, str]:
    """The options of a command that are written --name=value."""
    pairs = [word.partition("=") for word in command if word.startswith("--") and "=" in word]
    return {name: value for name, _, value in pairs}


def tool(name: str) -> str:
    """A linter of the development requirements."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed (launch/requirements/cpu.txt brings it)")
    return found

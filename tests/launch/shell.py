"""Runs the launch scripts in a clean environment, launch/npu_packages.sh with downloads that are made up."""

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
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


def fetch_npu_packages(folder: Path, *requirements: str) -> None:
    """Fetch an SGLang with these requirements."""
    listed = "".join(f'  "{each}",\n' for each in requirements)
    (folder / "pyproject_npu.toml").write_text(f'[project]\nname = "sglang"\ndependencies = [\n{listed}]\n')
    commands = {
        "git": f"""folder=${{@: -1}}/python
            mkdir -p "$folder"
            cp "{folder}/pyproject_npu.toml" "$folder\"""",
        "curl": 'while [ "$1" != -o ]; do shift; done; touch "$2"',
        "unzip": "true",
    }
    for name, body in commands.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    versions = {"PYTHON_VERSION": "3.12", "CANN_VERSION": "9", "CHIP": "a3", "TORCH_VERSION": "2"}
    versions |= {"TRITON_VERSION": "3", "TRANSFORMERS_VERSION": "5.12.1", "SGLANG_TAG": "v1", "KERNELS_TAG": "k1"}
    sources = {"SGLANG_SOURCE": "s", "TRITON_SOURCE": "t", "KERNELS_SOURCE": "https://kernels.example"}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    bash("launch/npu_packages.sh", str(folder / "fetched"), PATH=path, **versions, **sources)


def fetched_requirements(folder: Path) -> list[str]:
    """The requirements of the SGLang that `fetch_npu_packages` wrote."""
    project = tomllib.loads((folder / "fetched" / "sglang" / "python" / "pyproject.toml").read_text())["project"]
    return project["dependencies"]

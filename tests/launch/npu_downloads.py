"""Runs launch/npu_packages.sh with downloads that are made up."""

import os
import tomllib
from pathlib import Path

from tests.launch.shell import bash


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

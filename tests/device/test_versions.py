"""Older supported versions, run for real: each is installed into a folder of its own, before the installed one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.folders import ROOT

SGLANG = [  # engine start, log-probabilities, every in_flight mode, both transports, release and reload
    "tests/rollout/test_engine.py",
    "tests/weight_sync/test_synchronizer.py",
    "tests/weight_sync/test_transports.py",
    "tests/placement/test_time_sharing.py",
]
RAY = ["tests/cluster", "tests/trainer/test_remote.py"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("package", "tests"), [("sglang==0.5.22", SGLANG), ("ray==2.50.0", RAY)])
def test_an_older_version_passes_the_tests_of_its_seam(package: str, tests: list[str], tmp_path: Path) -> None:
    target = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), package]
    subprocess.run(install, check=True, timeout=600)

    name, _, version = package.partition("==")
    environment = {**os.environ, "PYTHONPATH": str(target)}
    found = f"import {name}; print({name}.__version__, {name}.__file__)"
    imported = subprocess.run(
        [sys.executable, "-c", found], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert imported.startswith(f"{version} {target}")

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 10

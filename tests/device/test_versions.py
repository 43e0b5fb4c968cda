"""The ends of the supported ranges, run for real: each version is installed into a folder of its own.

The folder comes before the installed packages. Where the package index has CUDA builds only, one of torch takes 7 GB.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.folders import ROOT

ENGINE = [
    "tests/rollout/test_engine.py",  # start, log-probabilities, pauses in every mode
    "tests/rollout/test_adapters_engine.py",
    "tests/weight_sync/test_synchronizer.py",  # both transports, every mode of `in_flight`
    "tests/weight_sync/test_released_engine.py",  # release, sync, reload
    "tests/weight_sync/test_delta_push.py",
]
CLUSTER = ["tests/cluster", "tests/trainer/test_remote.py"]
TRAINER = [
    "tests/model",
    "tests/trainer/test_step.py",
    "tests/trainer/test_ranks.py",  # FSDP2
    "tests/trainer/test_optimizer.py",
    "tests/trainer/test_fused_optimizer.py",
    "tests/checkpoint/test_rank_state.py",
    "tests/checkpoint/test_manager.py",
    "tests/offload/test_trainer.py",
    "tests/weight_sync/test_collective.py",
]
MODEL = ["tests/model", "tests/trainer/test_step.py", "tests/checkpoint/test_export.py", "tests/rollout/test_engine.py"]


@dataclass(frozen=True)
class Case:
    """Versions to install, and the tests that touch them."""

    requirements: tuple[str, ...]
    tests: list[str]
    options: tuple[str, ...] = ()  # of `pip install`

    def __str__(self) -> str:
        return self.requirements[0]


CASES = [
    Case(("sglang==0.5.22",), ENGINE, options=("--no-deps",)),  # it requires the accelerator stack
    Case(("ray==2.50.0",), CLUSTER),
    Case(("torch==2.10.0", "torchvision"), TRAINER),  # of launch/requirements/npu.txt
    Case(("torch==2.14.1", "torchvision"), TRAINER),
    Case(("transformers==5.12.0",), MODEL),
    Case(("transformers==5.23.0",), MODEL),
]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_version_at_the_end_of_its_range_passes_the_tests_that_touch_it(case: Case, tmp_path: Path) -> None:
    target = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
    pip = subprocess.run([*install, *case.options, *case.requirements], capture_output=True, text=True, timeout=1200)
    assert pip.returncode == 0, pip.stderr[-4000:]

    environment = {**os.environ, "PYTHONPATH": str(target)}
    name, _, version = case.requirements[0].partition("==")
    show = f"from importlib import metadata, util; print(metadata.version('{name}'), util.find_spec('{name}').origin)"
    found = subprocess.run(
        [sys.executable, "-c", show], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.match(rf"{re.escape(version)}(\+\w+)? {re.escape(str(target))}", found), found

    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "tests")]
    done = subprocess.run(
        [*command, *case.tests], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 10


def test_the_ends_of_every_supported_range_are_run() -> None:
    """The newest SGLang and Ray are installed: every other test runs them."""
    accepted = (ROOT / "pyproject.toml").read_text()
    for known in ("sglang>=0.5.22,<0.5.24", "ray>=2.50,<2.61", "torch>=2.10,<2.15", "transformers>=5.12,<5.24"):
        assert f'"{known}"' in accepted, f"{known} has moved: add its new ends to CASES"

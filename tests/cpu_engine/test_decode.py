"""A decode step on a CPU computes what SGLang's modules do; a model that is not plain runs SGLang's modules."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from app.device.cpu import DEVICE
from tests.cpu_engine.decode_step import CASES
from tests.folders import ROOT

ROUNDING = 2e-6  # of float32, relative


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.cpu_engine.decode_step` found, by case."""
    command = [sys.executable, "-m", "tests.cpu_engine.decode_step", str(tmp_path_factory.mktemp("models"))]
    environment = {**os.environ, **DEVICE.engine_env, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {each["case"]: each for each in found}


@pytest.mark.parametrize("case", CASES)
def test_a_decode_step_computes_what_sglangs_modules_do_and_a_changed_model_runs_them(
    steps: dict[str, Any], case: str
) -> None:
    step = steps[case]
    is_float32 = CASES[case][1] == "float32"
    assert step["difference"] <= (ROUNDING * step["size"] if is_float32 else 0)

    changed = dict.fromkeys(["adapter", "quantized", "another dtype", "hook"], False)
    assert step["plain"] == {"unchanged": "scaled" not in case, **changed}

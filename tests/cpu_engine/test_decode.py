"""A decode step on a CPU runs the replacements, with few operators a layer, and computes what SGLang's modules do."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from app.device.cpu import DEVICE
from tests.cpu_engine.decode_step import CASES, LAYERS
from tests.folders import ROOT

# Most operators of a layer, views too, with its share of the step's own. SGLang's own are 125 in float32.
MOST = {"float32": (95, 110), "bfloat16": (110, 135)}  # of the model as one function; of SGLang's modules
ROUNDING = 2e-6  # of float32, relative


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.cpu_engine.decode_step` found, by case."""
    command = [sys.executable, "-m", "tests.cpu_engine.decode_step", str(tmp_path_factory.mktemp("models"))]
    environment = {**os.environ, **DEVICE.engine_env, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {each["case"]: each for each in found}


PLAIN = [case for case in CASES if "scaled" not in case]


@pytest.mark.parametrize("case", PLAIN)
def test_a_layer_of_a_decode_step_is_few_operators_and_computes_what_sglangs_modules_do(
    steps: dict[str, Any], case: str
) -> None:
    step, dtype = steps[case], CASES[case][1]
    whole, modules = step["whole"], step["modules"]

    assert step["difference"] <= (ROUNDING * step["size"] if dtype == "float32" else 0)
    assert whole["aten.bmm"] == modules["aten.bmm"] == 2 * LAYERS
    assert "aten._scaled_dot_product_flash_attention_for_cpu" not in modules
    assert sum(whole.values()) < MOST[dtype][0] * LAYERS
    assert sum(modules.values()) < MOST[dtype][1] * LAYERS
    assert sum(whole.values()) <= sum(modules.values()) - 6 * LAYERS


@pytest.mark.parametrize("case", PLAIN)
def test_a_changed_model_runs_sglangs_modules(steps: dict[str, Any], case: str) -> None:
    plain = dict(steps[case]["plain"])
    assert plain.pop("unchanged")
    assert plain == dict.fromkeys(["adapter", "quantized", "another dtype", "hook"], False)


def test_a_model_with_scaled_rotary_embeddings_runs_sglangs_modules(steps: dict[str, Any]) -> None:
    step = steps["llama with scaled rotary embeddings"]
    assert not any(step["plain"].values())
    assert step["whole"] == step["modules"]
    assert step["difference"] == 0

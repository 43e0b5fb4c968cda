"""A decode step on a CPU runs the replacements, with few torch operators a layer."""

import json
import os
import subprocess
import sys
from pathlib import Path

from app.device.cpu import DEVICE
from tests.folders import ROOT

# Most operators of a layer of the tiny model, views too, with its share of the step's own. SGLang's own are 125.
WHOLE, MODULES = 100, 115


def test_a_layer_of_a_decode_step_is_few_operators_and_computes_what_sglangs_modules_do(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "tests.cpu_engine.decode_step", str(tiny_model)]
    environment = {**os.environ, **DEVICE.engine_env, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    result = json.loads(ran.stdout.splitlines()[-1])
    layers, whole, modules = result["layers"], result["whole"], result["modules"]

    assert result["difference"] < 1e-4
    assert whole["aten.bmm"] == modules["aten.bmm"] == 2 * layers
    assert "aten._scaled_dot_product_flash_attention_for_cpu" not in modules
    assert sum(whole.values()) < WHOLE * layers
    assert sum(modules.values()) < MODULES * layers

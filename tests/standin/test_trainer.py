"""A trainer rank does all its work on a device that is not the CPU, with the CPU's numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.standin.stages import ONE_RANK, SPARE, TWO_RANKS

STANDIN = Path(__file__).parent
SECONDS = 280
MASK_BYTES = 2048 * 2048  # the causal mask of the device's own attention stays on the device
NUMBERS = ("step 1", "step 2", "step 3", "step 3 again", "step 4")
ON_DEVICE = [name for name, scenario in {**TWO_RANKS, **ONE_RANK}.items() if scenario.device != "cpu"]
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    if shutil.which("g++") is None:
        pytest.skip("the stand-in device is compiled by g++, which is not installed")
    out = tmp_path_factory.mktemp("standin") / "results.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(STANDIN.parents[1]), str(STANDIN)])}
    command = [sys.executable, "-m", "tests.standin.stages", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", ON_DEVICE)
def test_no_stage_of_a_rank_fails_on_a_device_without_float64(name: str, results: Results) -> None:
    assert {stage: result for stage, result in results[name].items() if str(result).startswith("failed")} == {}


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
def test_steps_on_the_device_have_the_numbers_of_the_cpu(family: str, results: Results) -> None:
    """With doubles of the device's fused operators, which the CPU does not have."""
    ours, theirs = results[f"{family} float32"], results[f"{family} float32 cpu"]
    for stage in NUMBERS:
        assert ours[stage] == pytest.approx(theirs[stage], rel=1e-5), stage


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_step_after_a_restore_has_the_numbers_of_the_first_time(name: str, results: Results) -> None:
    assert results[name]["step 3 again"] == results[name]["step 3"]


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_checkpoint_of_the_device_can_be_exported(name: str, results: Results) -> None:
    exported = results[name]["export"]
    assert len(exported) == (56 if "qwen35" in name else 35)
    if f"{name} cpu" in results:
        assert exported == pytest.approx(results[f"{name} cpu"]["export"], rel=1e-3)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_an_offloaded_trainer_leaves_no_tensor_on_the_device(name: str, results: Results) -> None:
    offloaded = results[name]["offload"]
    assert offloaded["before"] > 100_000
    assert offloaded["after"] in (0, MASK_BYTES)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_moments_are_on_the_device_between_updates_unless_the_host_keeps_them(name: str, results: Results) -> None:
    moments, parameters = results[name]["moments"]
    assert moments == (0 if {**TWO_RANKS, **ONE_RANK}[name].extras else 2 * parameters) < 3 * parameters


@pytest.mark.parametrize("name", ON_DEVICE)
def test_every_bucket_holds_the_bytes_of_the_parameters(name: str, results: Results) -> None:
    for stage, counts in results[name].items():
        if stage.startswith(("sync", "delta")):
            assert counts["buckets"] > 1, stage
            assert counts["different"] == 0, stage
        if stage.startswith("delta"):
            assert counts["changed"] == 101 * 32, stage  # the embedding was moved


@pytest.mark.parametrize("name", ONE_RANK)
def test_running_out_of_device_memory_costs_the_step_alone(name: str, results: Results) -> None:
    """The error that a failed pass left behind holds its activations; the abort needs memory to gather parameters."""
    assert len(results[name]["out of memory"]) == len(SPARE)
    assert results[name]["out of memory, error held"] == "out of memory, the step is closed"


@pytest.mark.parametrize("name", ONE_RANK)
def test_the_host_waits_for_the_device_at_updates_only(name: str, results: Results) -> None:
    """Not in a layer, nor in a microbatch: metric sums, gradient norm and change of weights are read at the update."""
    waits = results[name]["host waits"]
    assert {line.split(":")[0] for line in waits} == {"app/trainer/reductions.py", "app/trainer/optimizer.py"}
    assert sum(waits.values()) == 3

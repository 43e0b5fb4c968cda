"""Composition and validation of every shipped choice."""

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir

from app.config import RunConfig
from app.config.algorithm import Correction
from app.config.compose import resolve, setting_names
from app.main import conf_path

SAY_WHAT_WAS_LOADED = """
import runpy, sys
try:
    runpy.run_module("app", run_name="__main__")
finally:
    print("loaded", sorted({"torch", "sglang", "ray", "transformers"} & set(sys.modules)))
"""


@pytest.fixture(scope="module", autouse=True)
def conf() -> Iterator[None]:
    with initialize_config_dir(conf_path(), version_base="1.3"):
        yield


def composed(*overrides: str) -> RunConfig:
    return resolve(compose("config", list(overrides)))


def test_all_48_combinations_of_model_algorithm_placement_and_device_compose() -> None:
    models, algorithms = ["tiny", "tiny_qwen35", "qwen3_4b", "qwen35_9b"], ["grpo", "dapo"]
    placements, devices = ["colocate", "fully_async"], ["cpu", "cuda", "npu"]
    seen = set()
    for model, algorithm, placement, device in itertools.product(models, algorithms, placements, devices):
        config = composed(f"model={model}", f"algorithm={algorithm}", f"placement={placement}", f"device={device}")
        seen.add((config.model.name, config.algorithm.name, config.placement.kind.name, config.device.kind.name))
    assert len(seen) == 48


@pytest.mark.parametrize("algorithm", ["dr_grpo", "gspo"])
def test_the_other_algorithms_compose(algorithm: str) -> None:
    assert composed(f"algorithm={algorithm}").algorithm.name == algorithm


def test_the_default_is_the_embedded_run() -> None:
    config = composed()
    names = (config.device.kind.name, config.model.name, config.data.name, config.algorithm.name)
    assert names == ("cpu", "tiny", "arithmetic", "grpo")
    assert config.placement.kind.name == "colocate"
    assert dict(config.reward.components) == {"exact": 1.0}


def test_a_model_brings_its_data_and_devices_and_the_command_line_wins() -> None:
    config = composed("model=qwen35_9b", "placement=fully_async", "device=npu")
    assert (config.data.name, dict(config.reward.components)) == ("dapo_math", {"math": 1.0})
    assert (config.placement.trainer_devices, config.placement.rollout_devices) == (4, 4)
    assert config.rollout.tensor_parallel == 4
    assert composed("model=qwen35_9b", "data=gsm8k").data.name == "gsm8k"
    assert composed("model=qwen35_9b", "rollout.tensor_parallel=2").rollout.tensor_parallel == 2


def test_the_correction_follows_from_staleness_unless_it_is_set() -> None:
    assert composed().correction is Correction.none
    assert composed("placement=fully_async").correction is Correction.tis
    assert (
        composed("placement=fully_async", "placement.max_staleness=0", "placement.in_flight=drain").correction
        is Correction.none
    )
    assert composed("placement=fully_async", "algorithm.correction=icepop").correction is Correction.icepop


def test_streaming_is_on_where_it_is_possible() -> None:
    assert composed("placement=fully_async").stream
    assert not composed("placement=fully_async", "algorithm.updates_per_step=2").stream
    assert not composed("placement=fully_async", "placement.stream=off").stream
    assert not composed().stream


def test_no_setting_is_called_batch_size() -> None:
    names = setting_names(RunConfig)
    assert "algorithm.prompts_per_step" in names
    assert not [name for name in names if "batch_size" in name]


def test_the_missions_line_composes_and_plans_in_seconds_without_the_heavy_libraries() -> None:
    line = ["device=npu", "placement=fully_async", "model=qwen35_9b"]
    started = time.perf_counter()
    composed_only = subprocess.run([sys.executable, "-m", "app", *line, "--cfg", "job"], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    assert composed_only.returncode == 0, composed_only.stderr
    assert "Qwen/Qwen3.5-9B" in composed_only.stdout
    assert seconds < 15, "5 s on an idle machine"
    plan = subprocess.run(
        [sys.executable, "-c", SAY_WHAT_WAS_LOADED, *line, "mode=plan"], capture_output=True, text=True
    )
    assert "trainer rank 3" in plan.stdout
    assert "tensor-parallel rank 3 of 4" in plan.stdout
    assert "32 prompts × 8 completions = 256 trajectories" in plan.stdout
    assert "loaded []" in plan.stdout

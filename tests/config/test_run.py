"""Composition of every choice, and what follows from the composed settings."""

import itertools
import re
import resource
import subprocess
import sys

import pytest

from app.config.algorithm import Correction
from app.config.compose import setting_names
from app.device import device_of
from app.rollout.server_args import engine_flags
from tests.compose import composed

PRINT_LOADED_LIBRARIES = """
import runpy, sys
try:
    runpy.run_module("app", run_name="__main__")
finally:
    print("loaded", sorted({"torch", "sglang", "ray", "transformers"} & set(sys.modules)))
"""


def without_heavy_libraries(*overrides: str) -> str:
    """The output of a command that must not import torch, SGLang, Ray or transformers."""
    command = [sys.executable, "-c", PRINT_LOADED_LIBRARIES, *overrides]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "loaded []" in result.stdout, result.stderr
    return result.stdout


def test_all_60_combinations_of_model_algorithm_placement_and_device_compose() -> None:
    models, algorithms = ["tiny", "tiny_qwen35", "tiny_tools", "qwen3_4b", "qwen35_9b"], ["grpo", "dapo"]
    placements, devices = ["colocate", "fully_async"], ["cpu", "cuda", "npu"]
    seen = set()
    for model, algorithm, placement, device in itertools.product(models, algorithms, placements, devices):
        config = composed(f"model={model}", f"algorithm={algorithm}", f"placement={placement}", f"device={device}")
        seen.add((config.model.name, config.algorithm.name, config.placement.kind.name, config.device.kind.name))
    assert len(seen) == 60


@pytest.mark.parametrize("algorithm", ["dr_grpo", "gspo", "cispo", "dppo", "sapo", "rloo", "maxrl"])
def test_the_other_algorithms_compose(algorithm: str) -> None:
    assert composed(f"algorithm={algorithm}").algorithm.name == algorithm


def test_the_default_is_the_embedded_run() -> None:
    config = composed()
    names = (config.device.kind.name, config.model.name, config.data.name, config.algorithm.name)
    assert names == ("cpu", "tiny", "arithmetic", "grpo")
    assert config.placement.kind.name == "colocate"
    assert dict(config.reward.components) == {"exact": 1.0}


@pytest.mark.parametrize(
    ("overrides", "in_evaluations", "tokenizer"),
    [
        ([], [], False),
        (["rollout.stop=[END]"], ["END"], True),
        (["rollout.stop=[END]", "eval.stop=[]"], [], True),
        (["eval.stop=[STOP]"], ["STOP"], True),
    ],
)
def test_evaluations_have_the_stop_strings_of_training_and_engines_get_a_tokenizer_for_them(
    overrides: list[str], in_evaluations: list[str], tokenizer: bool
) -> None:
    config = composed(*overrides)
    assert config.eval_stop == in_evaluations
    assert engine_flags(config, device_of(config.device.kind))["skip-tokenizer-init"] is not tokenizer


def test_a_decay_lasts_for_all_updates_of_all_steps() -> None:
    assert composed("algorithm=dapo", "steps=5").optimizer_updates == 5 * 16


def test_a_model_brings_its_data_and_devices_and_the_command_line_wins() -> None:
    config = composed("model=qwen35_9b", "placement=fully_async", "device=npu")
    assert (config.data.name, dict(config.reward.components)) == ("dapo_math", {"math": 1.0})
    assert (config.placement.trainer_devices, config.placement.rollout_devices) == (4, 4)
    assert config.rollout.tensor_parallel == 4
    assert composed("model=qwen35_9b", "data=gsm8k").data.name == "gsm8k"
    assert composed("model=qwen35_9b", "rollout.tensor_parallel=2").rollout.tensor_parallel == 2


def test_an_environment_brings_its_own_data_and_reward_whatever_the_model_brings() -> None:
    environment = ["environment=verifiers", "environment.id=some-env"]
    for model in (["model=qwen3_4b"], ["model=hf", "model.path=Qwen/Qwen3-4B"], []):
        for overrides in ([*model, *environment], [*environment, *model]):
            config = composed(*overrides)
            assert (config.data.name, dict(config.reward.components)) == ("environment", {"environment": 1.0})
    config = composed("model=qwen3_4b", "environment=openenv", "environment.url=ws://localhost:8000")
    assert (config.data.name, dict(config.reward.components)) == ("dapo_math", {"environment": 1.0})
    config = composed("model=qwen3_4b", "environment=openenv", "environment.url=ws://localhost:8000", "reward=exact")
    assert dict(config.reward.components) == {"exact": 1.0}
    config = composed("model=qwen3_4b", "environment=tools", "environment.tools=[my.tool]")
    assert dict(config.reward.components) == {"math": 1.0}


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
    names = setting_names()
    assert "algorithm.prompts_per_step" in names
    assert not [name for name in names if "batch_size" in name]


def test_the_missions_line_composes_and_plans_in_seconds_without_the_heavy_libraries() -> None:
    line = ["device=npu", "placement=fully_async", "model=qwen35_9b"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    composition = subprocess.run([sys.executable, "-m", "app", *line, "--cfg", "job"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert composition.returncode == 0, composition.stderr
    assert "Qwen/Qwen3.5-9B" in composition.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # the machine may be busy

    plan = without_heavy_libraries(*line, "mode=plan")
    assert "trainer rank 3" in plan
    assert "tensor-parallel rank 3 of 4" in plan
    assert "32 prompts × 8 completions = 256 trajectories" in plan


def test_help_shows_the_composed_settings_without_the_heavy_libraries() -> None:
    text = without_heavy_libraries("device=npu", "algorithm.clip_high=0.3", "data.prefix=$", "--help")
    assert re.search(r"^  device\.kind = npu +one of cpu, cuda, npu$", text, re.MULTILINE)
    assert re.search(r"^  algorithm\.clip_high = 0\.3 +a number of at least 0$", text, re.MULTILINE)
    assert re.search(r"^  data\.prefix = \$ +text$", text, re.MULTILINE)
    assert "algorithm: cispo, dapo, dppo, dr_grpo, grpo, gspo, maxrl, opd, rloo, sapo" in text
    assert "Hard bound on the staleness of a trajectory" in text

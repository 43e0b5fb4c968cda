"""Every preset composes to what its name says and begins with the command that runs it."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config.algorithm import Aggregation, AlgorithmConfig, Correction, OldPolicy, RatioLevel
from app.config.device import DeviceKind
from app.config.model import TINY_PRESETS
from app.config.placement import PlacementKind
from app.device import device_of
from app.main import conf_path
from app.mode.plan.memory import plan_memory
from app.model.architecture import architecture_of
from app.utils.units import GIB
from tests.compose import composed, jobs_of

CONF = Path(conf_path())
CPU_EXPERIMENTS = ["cpu1_smollm2", "tiny_tools"]
EXPERIMENTS = sorted({path.stem for path in (CONF / "experiment").glob("*.yaml")} - set(CPU_EXPERIMENTS))
SWEEPS = sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))
RUNNABLE = sorted(path for group in ("experiment", "sweep", "model", "algorithm") for path in (CONF / group).glob("*"))
MODELS = sorted({path.stem for path in (CONF / "model").glob("*.yaml")} - {"hf"})
PLACEMENTS = ["colocate", "fully_async"]
SIZES = {"prompts_per_step", "group_size"}  # of an algorithm
# Of GRPO the settings that define it, of the others what differs; the rest is the default.
PUBLISHED: dict[str, dict[str, Any]] = {
    "grpo": {
        "updates_per_step": 1,
        "normalize_by_std": True,
        "ratio": RatioLevel.token,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": Aggregation.seq_mean_token_mean,
        "dynamic_sampling": False,
        "overlong_buffer_fraction": 0.0,
    },
    "dapo": {
        "updates_per_step": 16,
        "clip_high": 0.28,
        "aggregation": Aggregation.token_mean,
        "dynamic_sampling": True,
        "overlong_buffer_fraction": 0.2,
    },
    "dr_grpo": {"normalize_by_std": False, "aggregation": Aggregation.seq_mean_token_sum_norm},
    "gspo": {"updates_per_step": 4, "ratio": RatioLevel.sequence, "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {
        "objective": "cispo",
        "old_policy": OldPolicy.rollout,
        "clip_low": 1.0,
        "clip_high": 4.0,
        "aggregation": Aggregation.token_mean,
    },
    "dppo": {"objective": "dppo", "old_policy": OldPolicy.rollout},
    "sapo": {"objective": "sapo", "updates_per_step": 4},
    "rloo": {"advantage": "rloo", "aggregation": Aggregation.seq_mean_token_sum},
    "maxrl": {"advantage": "maxrl"},
    "opd": {"reward_coefficient": 0.0, "aggregation": Aggregation.token_mean},
}

# What is meant for hardware. `model=hf` is for models of which one device can hold the whole training state: with
# AdamW's temporaries, one NPU cannot hold that of 4 B parameters.
HF = {"cuda": ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"), "npu": ("Qwen3-0.6B", "Qwen3-1.7B")}
ON_CARDS = [
    *([f"experiment={experiment}"] for experiment in EXPERIMENTS),
    *(
        [f"device={device}", f"placement={placement}", *model]
        for device, paths in HF.items()
        for placement in PLACEMENTS
        for model in (
            *([f"model={model}"] for model in MODELS if model not in TINY_PRESETS),
            *(["model=hf", f"model.path=Qwen/{path}"] for path in paths),
        )
    ),
]
CARD_GIB = {DeviceKind.cuda: 80, DeviceKind.npu: 64}
DEVICE_KINDS = {
    PlacementKind.colocate: {"shared device"},
    PlacementKind.fully_async: {"trainer device", "engine device"},
}


@pytest.mark.parametrize("algorithm", PUBLISHED)
@pytest.mark.parametrize("composition", ["placement=fully_async", "experiment=npu4_colocate_4b"])
def test_an_algorithm_is_the_published_one(composition: str, algorithm: str) -> None:
    config = composed(f"algorithm={algorithm}", composition)
    published = {**PUBLISHED["grpo"], **PUBLISHED[algorithm]}
    sizes = {name: getattr(config.algorithm, name) for name in SIZES}
    assert config.algorithm == AlgorithmConfig(name=algorithm, **published, **sizes)
    corrects = config.placement.max_staleness and config.algorithm.old_policy is OldPolicy.trainer
    assert config.correction is (Correction.tis if corrects else Correction.none)
    assert config.stream == (config.placement.kind is PlacementKind.fully_async and published["updates_per_step"] == 1)


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}={path.stem}")
def test_only_an_algorithm_preset_says_more_of_an_algorithm_than_its_sizes(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if path.parent.name == "algorithm":
        return
    assert set(content.get("algorithm", {})) <= SIZES
    choices = [each for each in content.get("defaults", []) if isinstance(each, dict)]
    assert not any(key.endswith("algorithm") for each in choices for key in each)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_to_what_its_name_says(name: str) -> None:
    config = composed(f"experiment={name}")
    hardware, _, rest = name.removesuffix("_mtp").partition("_")
    assert config.rollout.drafts is name.endswith("_mtp")
    placement, _, model = rest.rpartition("_")
    kind = hardware.rstrip("0123456789")

    assert config.device.kind.name == kind
    assert config.device_count == int(hardware.removeprefix(kind))
    assert config.model.name.endswith(model)
    assert config.placement.kind.name == placement
    assert config.data.name == "dapo_math"


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_a_preset_begins_with_the_command_that_runs_it(path: Path) -> None:
    if path.stem == "optuna":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")

    command = path.read_text().removeprefix("# @package _global_\n").partition("\n")[0]
    assert re.match(rf"# python -m app {path.parent.name}={path.stem}\b", command)
    composed(*shlex.split(command.removeprefix("# python -m app ")))


@pytest.mark.parametrize("composition", ON_CARDS, ids=",".join)
def test_a_preset_leaves_a_tenth_of_each_of_its_cards(composition: list[str]) -> None:
    config = composed(*composition)
    device = replace(device_of(config.device.kind), memory_query=None)  # the card of the plan, not of this machine
    model = architecture_of(config.model)
    assert model is not None
    plan = plan_memory(config, device, model)

    assert plan.capacity.bytes == CARD_GIB[config.device.kind] * GIB
    assert plan.engine.cache_bytes > 0
    kinds = {phase.device for phase in plan.phases}
    peaks = {kind: max(phase.bytes for phase in plan.phases if phase.device == kind) for kind in kinds}
    assert set(peaks) == DEVICE_KINDS[config.placement.kind]
    assert {kind: round(peak / GIB, 2) for kind, peak in peaks.items() if peak > 0.9 * plan.capacity.bytes} == {}


@pytest.mark.parametrize("name", [name for name in SWEEPS if name != "optuna"])
def test_every_job_of_a_sweep_composes(name: str) -> None:
    jobs = jobs_of([f"sweep={name}"], multirun=True)
    assert 6 <= len(jobs) <= 9
    for job in jobs:
        composed(*job)

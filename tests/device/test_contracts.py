"""Contracts with packages that cannot all run here: every supported version has the API that we use.

Quick: the installed SGLang and Ray. Soak: wheels of the other versions, downloaded and parsed.
"""

import ast
import re
from pathlib import Path

import pytest

from app.config.device import DeviceKind
from app.device import device_of
from app.mode.plan.memory import STATES_PER_REQUEST, TRACKING_STATES
from app.model.policy import FLOAT32_PARAMETERS
from app.rollout.host.server_connection import OLDEST_SGLANG
from app.rollout.server_args import MAX_BATCH, engine_flags
from tests.compose import composed
from tests.device import sglang_api, sglang_requests
from tests.device.packages import Package, installed, metadata, wheel

OLDEST, NEWEST = "sglang==0.5.22", "sglang==0.5.23"
PRESETS = (
    "device=cpu",
    "device=cuda model=qwen3_4b",
    "device=npu model=qwen35_9b placement=fully_async",
    "device=cuda model=qwen3_4b_lora",
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(
    params=["installed", pytest.param(OLDEST, marks=pytest.mark.slow), pytest.param(NEWEST, marks=pytest.mark.slow)]
)
def sglang(request: pytest.FixtureRequest, wheels: Path) -> Package:
    return installed("sglang") if request.param == "installed" else wheel(request.param, wheels)


@pytest.mark.parametrize("overrides", PRESETS)
def test_every_server_flag_exists(sglang: Package, overrides: str) -> None:
    config = composed(*overrides.split())
    flags = {*engine_flags(config, device_of(config.device.kind)), "model-path", "host", "port", "api-key"}
    assert flags - sglang_api.flags(sglang) == set()


def test_the_flag_check_detects_a_missing_flag(sglang: Package) -> None:
    known = sglang_api.flags(sglang)
    assert "no-such-flag" not in known
    assert 200 < len(known) < 2000


def test_every_route_exists(sglang: Package) -> None:
    used = set(sglang_requests.requests())
    assert {"/generate", "/pause_generation", "/update_weights_from_distributed", "/server_info"} <= used
    assert {"/update_weights_from_tensor", "/load_lora_adapter", "/load_lora_adapter_from_tensors"} <= used
    assert "/unload_lora_adapter" in used
    assert {"/begin_weight_update", "/end_weight_update"} <= used
    assert used - set(sglang_api.routes(sglang)) == set()


def test_every_field_of_every_body_exists(sglang: Package) -> None:
    routes = sglang_api.routes(sglang)
    checked = 0
    for route, sent in sglang_requests.requests().items():
        body = routes.get(route)
        if not sent:
            continue
        assert body is not None, route
        assert sent - sglang_api.fields(sglang, body) == set(), route
        checked += len(sent)
    assert checked >= 15


def test_no_request_has_images() -> None:
    """An engine of colocate releases its vision tower and no weight sync sends it again."""
    sent = sglang_requests.requests()["/generate"]
    assert {"input_ids", "logprob_start_len"} <= sent
    assert {field for field in sent if field.endswith("_data")} == set()


def test_every_sampling_parameter_exists(sglang: Package) -> None:
    sent = sglang_requests.sampling_fields()
    assert {"temperature", "max_new_tokens"} <= sent
    assert sent - sglang_api.fields(sglang, "SamplingParams", sglang_api.SAMPLING) == set()


def test_everything_we_import_exists(sglang: Package) -> None:
    imported = sglang_requests.imports("sglang")
    assert len(imported) >= 3
    missing = []
    for module, name in sorted(imported):
        path = module.replace(".", "/")
        file = f"{path}.py" if sglang.has(f"{path}.py") else f"{path}/__init__.py"
        if not (sglang.has(file) and sglang.defines(file, name)):
            missing.append(f"{module}.{name}")
    assert missing == []


MENTIONED = {  # by file or folder below sglang/srt
    "platforms": ["def get_dispatch_key_name"],
    "": ['"sglang.srt.platforms"', '"sglang.srt.plugins"', '"flattened_bucket"', "hccl"],
    "lora/lora_manager.py": [
        f"def {name}" for name in ("init_lora_shapes", "load_lora_weights", "load_lora_weights_from_tensors")
    ],
    "lora/layers.py": ["pin_memory=True"],
    "lora/backend/torch_backend.py": ["pin_memory=True"],
    "utils": ["def init_custom_process_group", "PrefixStore(group_name"],
    "managers/scheduler_components/weight_updater": ["ignore_waiting="],
}


def test_what_we_override_call_and_rely_on_is_there(sglang: Package) -> None:
    for path, texts in MENTIONED.items():
        missing = [text for text in texts if not sglang.mentions(text, f"sglang/srt/{path}".rstrip("/"))]
        assert missing == [], path
    assert sglang.defines("sglang/srt/lora/utils.py", "get_hidden_dim")


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_sglang_knows_our_devices(sglang: Package, kind: DeviceKind) -> None:
    assert sglang.mentions(f'"{device_of(kind).torch_type}"', "sglang/srt")
    assert sglang.mentions(f'"{device_of(kind).lora_backend}"', "sglang/srt/lora/backend")


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_sglang_reads_every_environment_variable_that_we_set(sglang: Package, kind: DeviceKind) -> None:
    ours = [name for name in device_of(kind).engine_env if name.startswith(("SGLANG_", "SGL_"))]
    assert [name for name in ours if not sglang.mentions(name, "sglang/srt")] == []


def test_weights_may_change_while_retracted_requests_wait(sglang: Package) -> None:
    """Without this parameter the scheduler counts them as running, and fails an assertion in the update."""
    tree = sglang.tree("sglang/srt/managers/scheduler.py")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    (function,) = [each for each in functions if each.name == "is_fully_idle"]
    assert "ignore_waiting" in [argument.arg for argument in function.args.args]


def test_the_oldest_accepted_version_is_the_one_that_is_tested() -> None:
    (extra,) = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("cuda = ")]
    assert f'"sglang>={OLDEST_SGLANG},<0.5.24"' in extra
    assert f"sglang=={OLDEST_SGLANG}" == OLDEST
    assert NEWEST.startswith("sglang==0.5.23")


def test_the_plan_counts_recurrent_states_of_a_request_as_sglang_does(sglang: Package) -> None:
    folder = "sglang/srt/mem_cache/"
    assert assigned(sglang, folder, "MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO") == [STATES_PER_REQUEST]
    assert f"return {TRACKING_STATES} if overlap else 1" in sglang.read(f"{folder}allocation_sizing.py")


def test_our_largest_batch_is_the_largest_graph_of_common_cards(sglang: Package) -> None:
    rule = sglang.read("sglang/srt/arg_groups/memory_hook.py").split("elif gpu_mem < 160 * 1024:")[1].split("else:")
    assert f"decode_cuda_graph_config.max_bs = {MAX_BATCH}" in rule[1]


def test_which_decays_an_engine_keeps_in_float32(sglang: Package) -> None:
    tree = sglang.tree("sglang/srt/models/qwen3_5.py")
    assignments = {
        ast.unparse(node.targets[0]).removeprefix("self."): ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("self.A_log", "self.dt_bias")
    }
    assert set(assignments) == set(FLOAT32_PARAMETERS)
    assert "torch.float32" in assignments["A_log"]
    assert "torch.float32" not in assignments["dt_bias"]


def assigned(package: Package, folder: str, name: str) -> list[object]:
    """The values of all module-level assignments of literals to a name."""
    return [
        ast.literal_eval(node.value)
        for path in package.under(folder)
        if name in package.read(path)
        for node in package.tree(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]


@pytest.mark.parametrize(
    "requirement",
    [
        "installed",
        pytest.param("ray==2.50.0", marks=pytest.mark.slow),
        pytest.param("ray==2.60.0", marks=pytest.mark.slow),
    ],
)
def test_ray_has_the_calls_the_resource_name_and_the_variables_that_we_use(requirement: str, wheels: Path) -> None:
    ray = installed("ray") if requirement == "installed" else wheel(requirement, wheels)
    npu = device_of(DeviceKind.npu)
    accelerator = ray.read("ray/_private/accelerators/npu.py")
    for text in (f'return "{npu.resource}"', f'"{npu.visibility}"', *(f'"{name}"' for name in npu.machine_env)):
        assert text in accelerator
    assert ray.defines("ray/util/placement_group.py", "remove_placement_group")
    assert ray.defines("ray/util/scheduling_strategies.py", "PlacementGroupSchedulingStrategy")
    assert ray.mentions("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "ray/_private")
    assert ray.mentions("RAY_DEDUP_LOGS", "ray/_private")


@pytest.mark.slow
def test_torch_npu_is_built_for_the_torch_of_the_requirements(wheels: Path) -> None:
    pins = (ROOT / "launch" / "requirements" / "npu.txt").read_text().splitlines()
    (plugin,) = [line for line in pins if line.startswith("torch_npu==")]
    (torch,) = [line for line in pins if line.startswith("torch==")]
    package = wheel(plugin, wheels)
    # On x86-64 it requires the CPU build, for which Dockerfile.npu sets an index.
    assert re.search(rf"^Requires-Dist: torch ?==?=?{torch.split('==')[1]}(\+cpu)?$", metadata(package), re.M)
    npu = device_of(DeviceKind.npu)
    assert package.mentions(f'rename_privateuse1_backend("{npu.torch_type}")', "torch_npu/_init")
    assert package.mentions(f'"{npu.collective}"', "torch_npu/_init")
    for name in ("empty_cache", "mem_get_info", "max_memory_allocated", "device_count", "is_available"):
        assert package.mentions(f"def {name}", "torch_npu/npu"), name


@pytest.mark.slow
def test_torch_memory_saver_has_the_calls_that_engines_make(wheels: Path) -> None:
    saver = wheel("torch_memory_saver==0.0.10", wheels)
    for name in ("region", "pause", "resume", "cuda_graph", "disable", "configure_subprocess"):
        assert saver.mentions(f"def {name}", "torch_memory_saver/"), name
    assert saver.mentions("hook_mode", "torch_memory_saver/")


@pytest.mark.slow
def test_the_newest_supported_sglang_has_the_api_of_the_installed_one(wheels: Path) -> None:
    local, newest = installed("sglang"), wheel(NEWEST, wheels)
    assert sglang_api.flags(local) == sglang_api.flags(newest)
    assert sglang_api.routes(local) == sglang_api.routes(newest)

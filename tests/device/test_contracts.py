"""Contracts with packages that cannot all run here: every supported version has what accelerators need of it.

Requests to a server are tested by real ones, of every supported version (tests/device/test_versions.py).
Quick: the installed SGLang and Ray. Slow: wheels of the other versions, downloaded and parsed.
"""

import ast
import re

import pytest

from app.config.device import DeviceKind
from app.device import device_of
from app.mode.plan.memory import STATES_PER_REQUEST, TRACKING_STATES
from app.model.policy import FLOAT32_PARAMETERS
from app.rollout.engine.server_args import engine_flags
from app.rollout.engine.sglang_plugin.patches import LOADED, TRANSPOSED
from tests.compose import composed
from tests.device.packages import ROOT, Package, installed, metadata, wheel

OLDEST, NEWEST = "sglang==0.5.22", "sglang==0.5.23"
PRESETS = (
    "device=cpu",
    "device=cuda model=qwen3_4b",
    "device=npu model=qwen35_9b placement=fully_async",
    "device=cuda model=qwen3_4b_lora",
)


@pytest.fixture(
    params=["installed", pytest.param(OLDEST, marks=pytest.mark.slow), pytest.param(NEWEST, marks=pytest.mark.slow)]
)
def sglang(request: pytest.FixtureRequest) -> Package:
    return installed("sglang") if request.param == "installed" else wheel(request.param)


def test_every_server_flag_exists(sglang: Package) -> None:
    known = flags_of(sglang)
    assert 200 < len(known) < 2000
    for overrides in PRESETS:
        config = composed(*overrides.split())
        flags = {*engine_flags(config, device_of(config.device.kind)), "model-path", "host", "port", "api-key"}
        assert flags - known == set(), overrides


def flags_of(package: Package) -> set[str]:
    """Names of server flags, without the dashes: dataclass fields, and literals passed to the parser."""
    names: set[str] = set()
    for path in ["sglang/srt/server_args.py", *package.under("sglang/srt/arg_groups/fields/")]:
        for node in ast.walk(package.tree(path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id.replace("_", "-"))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
                names.add(node.value.removeprefix("--"))
    return names


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
    "plugins/hook_registry.py": ["cls._hooks[target].append((hook_type, hook,", "cls._patched.add(target)"],
}


def test_what_we_override_call_and_rely_on_is_there(sglang: Package) -> None:
    for path, texts in MENTIONED.items():
        missing = [text for text in texts if not sglang.mentions(text, f"sglang/srt/{path}".rstrip("/"))]
        assert missing == [], path
    assert sglang.defines("sglang/srt/lora/utils.py", "get_hidden_dim")


def test_the_transposed_convolutions_of_npus_need_our_refresh(sglang: Package) -> None:
    """Where this fails because SGLang wraps the convolution's loader, the hook of `derived_weights` can go."""
    backend = sglang.read("sglang/srt/hardware_backend/npu/attention/ascend_gdn_backend.py")
    assert f'getattr(layer, "{TRANSPOSED}", None)' in backend
    assert "layer.conv_weights.transpose(0, 1).contiguous()" in backend
    assert not sglang.mentions("wrap_conv1d_weight_loader", "sglang/srt")


def test_every_load_of_weights_ends_with_the_method_that_we_hook(sglang: Package) -> None:
    """A sync over any transport, a delta, and a checkpoint from disk."""
    *_, owner, method = LOADED.split(".")
    call = f"{owner}.{method}("
    updater = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
    assert last_statement(sglang, updater, "end_weight_update").startswith(call)
    assert last_statement(sglang, "sglang/srt/model_loader/loader.py", "load_weights_and_postprocess").startswith(call)
    assert "loader.load_weights_and_postprocess(model, iter, target_device)" in sglang.read(updater)

    # Both transports work in a session only, which this closes.
    scheduler = sglang.read("sglang/srt/managers/scheduler_components/weight_updater.py")
    assert "update_weights_from_distributed must run between" in scheduler
    assert "update_weights_from_tensor must run between" in scheduler
    assert "runner.weight_updater.end_weight_update(run_post_load=run_post_load)" in scheduler


def last_statement(package: Package, path: str, function: str) -> str:
    """The last statement of the first function of that name."""
    nodes = [node for node in ast.walk(package.tree(path)) if isinstance(node, ast.FunctionDef)]
    return ast.unparse(next(node for node in nodes if node.name == function).body[-1])


def test_the_other_copies_of_weights_are_refreshed_by_sglang(sglang: Package) -> None:
    """Or are none: the list is in CONTRIBUTING.md."""
    assert "gemma_weight" in last_statement(sglang, "sglang/srt/layers/layernorm.py", "_weight_loader")
    model = sglang.read("sglang/srt/models/qwen3_5.py")
    for view in ("qkvz.weight.data = fused[", "ba.weight.data = fused[", "conv_weights = self.conv1d.weight.view("):
        assert view in model, view


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_sglang_knows_our_devices_and_reads_every_variable_that_we_set(sglang: Package, kind: DeviceKind) -> None:
    assert sglang.mentions(f'"{device_of(kind).torch_type}"', "sglang/srt")
    assert sglang.mentions(f'"{device_of(kind).lora_backend}"', "sglang/srt/lora/backend")
    ours = [name for name in device_of(kind).engine_env if name.startswith(("SGLANG_", "SGL_"))]
    assert [name for name in ours if not sglang.mentions(name, "sglang/srt")] == []


def test_weights_may_change_while_retracted_requests_wait(sglang: Package) -> None:
    """Without this parameter the scheduler counts them as running, and fails an assertion in the update."""
    tree = sglang.tree("sglang/srt/managers/scheduler.py")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    (function,) = [each for each in functions if each.name == "is_fully_idle"]
    assert "ignore_waiting" in [argument.arg for argument in function.args.args]


def test_the_plan_counts_recurrent_states_of_a_request_as_sglang_does(sglang: Package) -> None:
    folder = "sglang/srt/mem_cache/"
    assert assigned(sglang, folder, "MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO") == [STATES_PER_REQUEST]
    assert f"return {TRACKING_STATES} if overlap else 1" in sglang.read(f"{folder}allocation_sizing.py")


def test_our_largest_batch_is_the_largest_graph_of_common_cards(sglang: Package) -> None:
    rule = sglang.read("sglang/srt/arg_groups/memory_hook.py").split("elif gpu_mem < 160 * 1024:")[1].split("else:")
    assert f"decode_cuda_graph_config.max_bs = {device_of(DeviceKind.cuda).request_bounds[1]}" in rule[1]


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
def test_ray_has_the_calls_the_resource_name_and_the_variables_that_we_use(requirement: str) -> None:
    ray = installed("ray") if requirement == "installed" else wheel(requirement)
    npu = device_of(DeviceKind.npu)
    accelerator = ray.read("ray/_private/accelerators/npu.py")
    for text in (f'return "{npu.resource}"', f'"{npu.visibility}"', *(f'"{name}"' for name in npu.machine_env)):
        assert text in accelerator
    assert ray.defines("ray/util/placement_group.py", "remove_placement_group")
    assert ray.defines("ray/util/scheduling_strategies.py", "PlacementGroupSchedulingStrategy")
    assert ray.mentions("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "ray/_private")
    assert ray.mentions("RAY_DEDUP_LOGS", "ray/_private")


@pytest.mark.slow
def test_torch_npu_is_built_for_the_torch_of_the_requirements() -> None:
    pins = (ROOT / "launch" / "requirements" / "npu.txt").read_text().splitlines()
    (plugin,) = [line for line in pins if line.startswith("torch_npu==")]
    (torch,) = [line for line in pins if line.startswith("torch==")]
    package = wheel(plugin)
    # On x86-64 it requires the CPU build, for which Dockerfile.npu sets an index.
    assert re.search(rf"^Requires-Dist: torch ?==?=?{torch.split('==')[1]}(\+cpu)?$", metadata(package), re.M)
    npu = device_of(DeviceKind.npu)
    assert package.mentions(f'rename_privateuse1_backend("{npu.torch_type}")', "torch_npu/_init")
    assert package.mentions(f'"{npu.collective}"', "torch_npu/_init")
    for name in ("empty_cache", "mem_get_info", "max_memory_allocated", "device_count", "is_available"):
        assert package.mentions(f"def {name}", "torch_npu/npu"), name


@pytest.mark.slow
def test_torch_memory_saver_has_the_calls_that_engines_make() -> None:
    saver = wheel("torch_memory_saver==0.0.10")
    for name in ("region", "pause", "resume", "cuda_graph", "disable", "configure_subprocess"):
        assert saver.mentions(f"def {name}", "torch_memory_saver/"), name
    assert saver.mentions("hook_mode", "torch_memory_saver/")

"""The checks of the CUDA stack. Each runs in a process of its own, in the environment of `launch/setup.sh cuda`."""

import base64
import importlib
import inspect
import io
import json
import multiprocessing
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.real_stack.check import OF_EVERY_MACHINE, ROOT, Check, run_doctor
from tests.real_stack.stub import stub_cuda_driver

# A server's environment, as `app/rollout/engine/entry.py` and `app/device/cuda.py` make it.
ENGINE = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "app.rollout.engine.sglang_plugin.models", "POSTTRAIN_ENGINE_DEVICE": "cuda"}
WITHOUT_DRIVER = (
    "torch torchvision torchaudio flashinfer torch_memory_saver fla flash_attn.cute deep_gemm ray renderers "
    "sglang.srt.entrypoints.http_server sglang.srt.managers.scheduler app.rollout.engine.entry "
    "app.trainer.rank"
)
WITH_DRIVER = (
    "sgl_kernel sgl_kernel.flash_attn flashinfer.decode sglang.srt.layers.attention.flashattention_backend "
    "sglang.srt.layers.attention.linear.gdn_backend sglang.srt.models.qwen3 sglang.srt.models.qwen3_5 "
    "sglang.srt.managers.scheduler"
)
LEAST_HOOKS = 7
COMPILE_TABLE = "tests/model/test_kernels.py::test_recomputed_layers_take_the_graphs_of_their_forward"
OF_THE_MACHINE = OF_EVERY_MACHINE | {"nvidia-smi", "limits"}


def imports_without_a_driver() -> Any:
    """What a trainer rank and the launcher import needs no driver."""
    return _imported(WITHOUT_DRIVER.split())


def imports_with_a_driver() -> Any:
    """Kernels and models of an engine load beside a driver that has the functions they bind."""
    from tests.real_stack import fake_gpu

    fake_gpu.pretend(1)
    return _imported(WITH_DRIVER.split())


def _imported(modules: Sequence[str]) -> dict[str, list[str]]:
    failed = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException:
            failed[module] = traceback.format_exc(limit=-2)
    assert not failed, json.dumps(failed, indent=1)
    return {"imported": [*modules]}


def requirements() -> Any:
    """Every requirement of pyproject.toml, with the CUDA extra, is installed in a version that it accepts."""
    from importlib.metadata import version

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [Requirement(each) for each in (*project["dependencies"], *project["optional-dependencies"]["cuda"])]
    wrong = {str(each): version(each.name) for each in names if not each.specifier.contains(version(each.name))}
    assert not wrong, wrong
    return {each.name: version(each.name) for each in names}


def doctor() -> Any:
    """`mode=doctor` of every CUDA experiment fails for what this machine lacks, and for nothing that is installed."""
    return run_doctor("cuda", OF_THE_MACHINE)


def server_args() -> Any:
    """SGLang accepts the flags of every preset on one, four and eight H100s, and keeps those that we gave."""
    from app.config.device import DeviceKind
    from tests.real_stack import fake_gpu

    fake_gpu.pretend(1)
    from sglang.srt.plugins import load_plugins

    from tests.real_stack.server_args import resolve_all

    load_plugins()
    return resolve_all(DeviceKind.cuda, fake_gpu.pretend)


def plugin_hooks() -> Any:
    """SGLang finds the plugin by its entry point, applies every hook of it, and stays on its own CUDA platform."""
    from tests.real_stack import fake_gpu

    fake_gpu.pretend(1)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.platforms import current_platform

    ours = [target for target, hooks in HookRegistry._hooks.items() if any(of_ours(hook) for _, hook, _ in hooks)]
    assert len(ours) >= LEAST_HOOKS, ours
    assert set(ours) <= HookRegistry._patched, set(ours) - HookRegistry._patched
    assert type(current_platform).__module__.startswith("sglang."), type(current_platform)
    return {
        "hooks": sorted(ours),
        "platform": type(current_platform).__name__,
        "models": sorted(name for name in ModelRegistry.models if name.startswith("Qwen3")),
    }


def of_ours(hook: Any) -> bool:
    return getattr(hook, "__module__", type(hook).__module__).startswith("app.")


def ipc_payload() -> Any:
    """A bucket's payload with a CUDA handle passes SGLang's unpickler, which maps the UUID to its own device."""
    from tests.real_stack import fake_gpu

    fake_gpu.pretend(1)
    import torch
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from torch.multiprocessing import reductions

    from app.weight_sync.buckets import Bucket, TensorMeta
    from app.weight_sync.transport import ipc_payload as payload

    bucket = Bucket((TensorMeta("model.a", "bfloat16", (4, 8)), TensorMeta("model.b", "float32", (3,))))
    buffer = torch.zeros(bucket.bytes, dtype=torch.uint8)

    def handle(tensor: torch.Tensor) -> tuple[Any, ...]:
        """What `reduce_tensor` returns of a CUDA tensor: the arguments of `rebuild_cuda_tensor`, in order."""
        storage = (torch.storage.TypedStorage, torch.uint8, 0, b"h" * 66, tensor.numel(), 0, False)
        event = (b"/torch_1_2", 0, b"e" * 64, True)
        return reductions.rebuild_cuda_tensor, (torch.Tensor, tensor.size(), tensor.stride(), 0, *storage, *event)

    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[payload.CUDA_DEVICE_ARGUMENT] == "storage_device", names

    content = payload.flattened(buffer, bucket)
    with mock.patch.object(payload, "reductions", SimpleNamespace(reduce_tensor=handle)):
        content["flattened_tensor"] = payload._TensorByUuid(content["flattened_tensor"])
        pickled = io.BytesIO()
        multiprocessing.reduction.ForkingPickler(pickled).dump(content)

    rebuilt: list[Any] = []

    def rebuild(*arguments: Any) -> torch.Tensor:
        rebuilt.extend(arguments)
        return torch.zeros(bucket.bytes, dtype=torch.uint8)

    monkey_patch_torch_reductions()
    with mock.patch.object(reductions, "_rebuild_cuda_tensor_original", rebuild):
        received = MultiprocessingSerializer.deserialize(base64.b64encode(pickled.getvalue()).decode())
    assert rebuilt[payload.CUDA_DEVICE_ARGUMENT] == 0, rebuilt
    ranges = [(each.name, each.start_idx, each.end_idx) for each in received["metadata"]]
    assert ranges == [("model.a", 0, 64), ("model.b", 64, 76)], ranges
    return {"device": rebuilt[payload.CUDA_DEVICE_ARGUMENT], "arguments": len(rebuilt)}


def process_group() -> Any:
    """Both sides of a weight sync's process group join, broadcast, leave and abort on this torch, over Gloo."""
    from tests.real_stack.groups import join_broadcast_and_abort

    return join_broadcast_and_abort()


def compile_table() -> Any:
    """Recomputed layers take the compiled graphs of their forward pass: both families, one and two ranks."""
    command = [sys.executable, "-m", "pytest", "-m", "slow", "-p", "no:cacheprovider", COMPILE_TABLE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-3000:]
    return {"cases": done.stdout.partition("[")[0].count(".")}


CHECKS = (
    Check(requirements),
    Check(imports_without_a_driver),
    Check(imports_with_a_driver, driver=True, environment=ENGINE),
    Check(doctor),
    Check(server_args, driver=True, environment=ENGINE, timeout_s=1800),
    Check(plugin_hooks, driver=True, environment=ENGINE),
    Check(ipc_payload, driver=True, environment=ENGINE),
    Check(process_group),
    Check(compile_table, timeout_s=1800),
)


def prepare(_: Path, folder: Path) -> Path:
    """Compile what stands in for the driver; return its folder."""
    return stub_cuda_driver(folder / "driver")

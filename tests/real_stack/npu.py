"""The checks of the NPU stack, as far as package indexes have it. Each runs in a process of its own."""

import ast
import base64
import inspect
import io
import re
from collections import defaultdict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.real_stack.check import OF_EVERY_MACHINE, ROOT, Check, run_doctor
from tests.real_stack.npu_import import import_torch_npu, write_cann

APP = ROOT / "app"
CARD, CARD_BYTES = "Ascend910_9391", 64 * 2**30
ENGINE = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "app.rollout.engine.sglang_plugin.models", "POSTTRAIN_ENGINE_DEVICE": "npu"}
BY_HAND = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # else `import torch` would import torch_npu
OF_THE_MACHINE = OF_EVERY_MACHINE | {"npu-smi", "toolkit"}
NO_INDEX_HAS = {"sgl_kernel_npu", "triton_ascend", "torch_memory_saver"}


def torch_npu_imports() -> Any:
    """torch_npu registers its device type, its device module and its collective with torch."""
    import torch
    import torch.distributed as dist

    plugin = import_torch_npu()
    npu = our_device()
    assert torch._C._get_privateuse1_backend_name() == npu.torch_type
    assert torch.get_device_module(npu.torch_type) is plugin.npu
    assert dist.Backend.default_device_backend_map[npu.torch_type] == npu.collective
    chosen = dist.distributed_c10d.BackendConfig(dist.Backend(f"cpu:gloo,{npu.torch_type}:{npu.collective}"))
    assert chosen.get_device_backend_map() == {"cpu": "gloo", npu.torch_type: npu.collective}
    assert not plugin.npu.is_available()
    return {"torch": torch.__version__, "torch_npu": plugin.__version__}


def device_module_calls() -> Any:
    """Every call of ours on `torch.npu` fits the function that is there."""
    module = import_torch_npu().npu
    calls = calls_on_device_module()
    assert {"set_device", "mem_get_info", "empty_cache", "Event", "get_rng_state"} <= set(calls), sorted(calls)
    problems = {name: problem for name, shapes in calls.items() if (problem := misfit(module, name, shapes))}
    for kind, methods in {"Event": ("record", "synchronize", "elapsed_time"), "Stream": ("synchronize",)}.items():
        problems |= {f"{kind}.{each}": "missing" for each in methods if not hasattr(getattr(module, kind), each)}
    assert not problems, problems
    return {"calls": sorted(calls)}


def collective_calls() -> Any:
    """Every call of ours of torch.distributed fits the function that torch_npu puts in its place."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    before = {name: getattr(distributed_c10d, name) for name in dir(distributed_c10d)}
    import_torch_npu()
    calls = calls_of_distributed()
    owners = {name: dist if hasattr(dist, name) else distributed_c10d for name in calls}
    found = {name: problem for name, shapes in calls.items() if (problem := misfit(owners[name], name, shapes))}
    # An NPU never gets there: shards are all-gathered. A newer name is used behind a check.
    assert set(found) <= {"gather", "all_gather_single"}, found
    assert not our_device().has_gather
    replaced = sorted(name for name in calls if before.get(name) is not getattr(owners[name], name, None))
    return {"calls": sorted(calls), "replaced": replaced, "not called on NPUs": found}


def fusion_attention() -> Any:
    """Our attention passes the operator's own checks of names, types and shapes."""
    import torch

    import_torch_npu()
    from torch_npu.op_plugin.meta import _meta_registrations

    from app.device.npu import fusion_attention

    _meta_registrations._npu_fusion_attention_warning_printed = True  # else it asks the device for its kind
    query, key, value = (torch.empty(48, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8, 8))
    out = fusion_attention(query, key, value, [0, 16, 48], 128**-0.5)
    assert (out.shape, out.dtype) == (query.shape, query.dtype), (out.shape, out.dtype)
    return {"schema": str(torch.ops.npu.npu_fusion_attention.default._schema)}


def elementwise() -> Any:
    """Our calls of the fused operators pass their own checks; they and their gradients are registered for NPUs."""
    import torch

    import_torch_npu()
    fused = our_device().elementwise
    hidden, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 48, 2560), (2560,)))
    heads, angles = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 48, 32, 128), (1, 48, 1, 128))
    )
    results = (fused.rms_norm(hidden, weight, 1e-6), fused.swiglu(hidden), fused.rotate(heads, angles, angles))
    assert [tuple(each.shape) for each in results] == [(1, 48, 2560), (1, 48, 1280), (1, 48, 32, 128)]
    assert {each.dtype for each in results} == {torch.bfloat16}

    schemas = {}
    for name in ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul"):
        for each, keys in ((name, ("PrivateUse1", "AutogradPrivateUse1")), (f"{name}_backward", ("PrivateUse1",))):
            schemas[each] = str(getattr(torch.ops.npu, each).default._schema).removeprefix(f"npu::{each}")
            missing = [key for key in keys if not registered(f"npu::{each}", key)]
            assert not missing, (each, missing)
    return {"schemas": schemas}


def fused_adamw() -> Any:
    """torch accepts `fused=True` for NPUs, and torch_npu has the kernel that it calls."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    import_torch_npu()
    npu = our_device()
    assert npu.fused_optimizer
    assert npu.torch_type in _get_fused_kernels_supported_devices()
    kernels = {name: registered(f"aten::{name}", "PrivateUse1") for name in ("_fused_adamw_", "_fused_adagrad_")}
    assert kernels == {"_fused_adamw_": True, "_fused_adagrad_": False}, kernels
    return {"registered": kernels}


def registered(operator: str, key: str) -> bool:
    """Whether an operator has a kernel of its own for a dispatch key; a fallback to the CPU does not count."""
    import torch

    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def environment_variables() -> Any:
    """torch_npu's library reads every variable that we set for its sake, and refuses what we avoid."""
    from importlib.util import find_spec

    npu = our_device()
    spec = find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    library = (Path(spec.origin).parent / "lib" / "libtorch_npu.so").read_bytes()
    names = {*npu.trainer_defaults, *npu.allocator_variables, "expandable_segments"}
    missing = [name for name in sorted(names) if name.encode() not in library]
    assert not missing, missing
    assert b"Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture" in library
    assert npu.engine_env["TASK_QUEUE_ENABLE"] == "1"
    return {"names": sorted(names)}


def aborting_hccl() -> Any:
    """The backend has the call that ends everything in flight, with one text."""
    plugin = import_torch_npu()
    abort = plugin._C._distributed_c10d.ProcessGroupHCCL.abort_hccl_comm
    signature = abort.__doc__.strip()
    assert re.search(r"abort_hccl_comm\(self: [\w.]+, \w+: str\b", signature), signature
    backend = mock.Mock(spec=plugin._C._distributed_c10d.ProcessGroupHCCL)
    our_device().abort_backend(backend)
    ((text,), _) = backend.abort_hccl_comm.call_args
    return {"signature": signature, "text": text}


def ipc_payload() -> Any:
    """A bucket's payload with an NPU handle passes SGLang's unpickler, and reaches torch_npu's rebuilding."""
    import torch

    import_torch_npu()
    pretend(1)
    from app.device.torchvision_shim import define_operators

    define_operators()
    from sglang.srt.utils import MultiprocessingSerializer
    from torch_npu.multiprocessing import reductions

    from app.weight_sync.buckets import Bucket, TensorMeta
    from app.weight_sync.transport.ipc_payload import flattened

    class Handle:
        """What torch_npu's reducer returns of an NPU tensor."""

        def __reduce__(self) -> tuple[Any, ...]:
            storage = (torch.storage.TypedStorage, torch.uint8, 0, b"h" * 66, bucket.bytes, 0, False)
            arguments = (torch.Tensor, torch.Size((bucket.bytes,)), (1,), 0, *storage, b"counter", 0, b"event", True)
            inspect.signature(reductions.rebuild_npu_tensor).bind(*arguments)
            return reductions.rebuild_npu_tensor, arguments

    bucket = Bucket((TensorMeta("model.a", "bfloat16", (4, 8)), TensorMeta("model.b", "float32", (3,))))
    content = flattened(torch.zeros(bucket.bytes, dtype=torch.uint8), bucket) | {"flattened_tensor": Handle()}
    pickled = io.BytesIO()
    ForkingPickler(pickled).dump(content)
    with mock.patch.object(reductions, "rebuild_npu_tensor", lambda *given: given[4:7]):
        received = MultiprocessingSerializer.deserialize(base64.b64encode(pickled.getvalue()).decode())
    assert received["flattened_tensor"][2] == 0, received["flattened_tensor"]
    return {"names": [each.name for each in received["metadata"]]}


def server_args() -> Any:
    """SGLang accepts the flags of every preset on one, four and eight NPUs, and keeps those that we gave."""
    from app.config.device import DeviceKind

    import_torch_npu()
    pretend(1)
    from sglang.srt.platforms import current_platform

    from tests.real_stack.server_args import resolve_all

    assert type(current_platform).__name__ == "NPUSRTPlatform", current_platform
    return resolve_all(DeviceKind.npu, pretend)


def doctor() -> Any:
    """`mode=doctor` of every NPU experiment fails for what this machine and package indexes lack, and nothing else."""
    return run_doctor("npu", OF_THE_MACHINE | NO_INDEX_HAS)


def our_device() -> Any:
    from app.config.device import DeviceKind
    from app.device import device_of

    return device_of(DeviceKind.npu)


def pretend(devices: int) -> None:
    """Let `torch.npu` of this process describe so many dies of an A3."""
    import torch

    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": devices,
        "current_device": 0,
        "get_device_name": CARD,
        "get_device_properties": SimpleNamespace(name=CARD, total_memory=CARD_BYTES, uuid="npu-0"),
        "mem_get_info": (CARD_BYTES - 2**28, CARD_BYTES),
        "memory_allocated": 0,
        "memory_reserved": 0,
        **dict.fromkeys(("get_device_capability", "_lazy_init", "set_device", "synchronize", "empty_cache")),
    }
    for name, value in answers.items():
        setattr(vars(torch)["npu"], name, mock.Mock(return_value=value))


Shape = tuple[int, tuple[str, ...]]  # of a call: positional arguments, keywords


def misfit(owner: Any, name: str, shapes: set[Shape]) -> str | None:
    """Why a function does not take calls of these shapes; None if it does, or does not say what it takes."""
    function = getattr(owner, name, None)
    if function is None:
        return "missing"
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C++
        return None
    for positional, keywords in shapes:
        try:
            signature.bind(*[None] * positional, **dict.fromkeys(keywords))
        except TypeError as error:
            return str(error)
    return None


def calls_of_distributed() -> dict[str, set[Shape]]:
    """Function of torch.distributed → shapes of our calls, of those that `dist.` or an import names."""
    calls: dict[str, set[Shape]] = defaultdict(set)
    for tree in trees():
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and node.module in ("torch.distributed", "torch.distributed.distributed_c10d")
            for alias in node.names
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            module, _, name = ast.unparse(call.func).rpartition(".")
            if module == "dist" or (not module and name in imported):
                calls[name].add(shape_of(call))
    return dict(calls)


def calls_on_device_module() -> dict[str, set[Shape]]:
    """Function of `torch.<device>` → shapes of our calls, on `get_device_module(…)` and on what holds its result."""
    calls: dict[str, set[Shape]] = defaultdict(set)
    for tree in trees():
        holders = {holder for node in ast.walk(tree) if (holder := _holder(node))}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Attribute):
                continue
            if _is_device_module(call.func.value) or ast.unparse(call.func.value) in holders:
                calls[call.func.attr].add(shape_of(call))
    return dict(calls)


def _holder(node: ast.AST) -> str | None:
    """The name of a variable, attribute or property that is a device module."""
    if isinstance(node, ast.Assign) and _is_device_module(node.value):
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.FunctionDef) and any(
        isinstance(each, ast.Return) and "torch.get_device_module(" in ast.unparse(each) for each in node.body
    ):
        return f"self.{node.name}"
    return None


def _is_device_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.get_device_module"


def shape_of(call: ast.Call) -> Shape:
    return len(call.args), tuple(sorted(each.arg for each in call.keywords if each.arg))


def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted(APP.rglob("*.py"))]


OF_TORCH_NPU = (
    torch_npu_imports,
    device_module_calls,
    collective_calls,
    fusion_attention,
    elementwise,
    fused_adamw,
    environment_variables,
    aborting_hccl,
    ipc_payload,
    server_args,
)
CHECKS = (
    *(Check(check, driver=True, environment=BY_HAND | ENGINE, timeout_s=1800) for check in OF_TORCH_NPU),
    Check(doctor, environment=BY_HAND),
)


def prepare(python: Path, folder: Path) -> Path:
    """Compile what stands in for CANN; return its folder."""
    return write_cann(python, folder / "cann")

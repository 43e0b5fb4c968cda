"""The device abstraction: shared code names no device and no collective library; each kind is one complete value."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.config.device import DeviceKind
from app.device import device_of
from tests.device.packages import APP
from tests.refusals import refused

NAMES = re.compile(r"(?<![a-z])(cuda|npu|nccl|hccl)(?![a-z])", re.I)
SEAM = APP / "device"
ALLOWED = {
    "app/config/device.py": {"cuda", "npu"},  # the values of `device.kind`
    # A local Ray counts NPUs only if their number is passed.
    "app/cluster/connect.py": {"npu"},
    # On CUDA only, torch puts the device index into a tensor's handle; two processes may number devices differently.
    "app/weight_sync/transport/ipc_payload.py": {"cuda", "CUDA_DEVICE_ARGUMENT"},
}
DOCTOR = APP / "mode" / "doctor"
DRIVER_CHECKS = {DOCTOR / name for name in ("device.py", "ascend.py")}  # drivers and toolkits of the vendors
# SGLang uses these names on every device.
SGLANG_NAMES = {
    "cuda_graph",
    "cuda-graph-max-bs-decode",
    "disable-cuda-graph",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH",
    "torch.cuda.synchronize",  # by its weight checker
}


def tokens(path: Path) -> Iterator[tuple[int, str]]:
    """(line, token) of every name and string outside comments and docstrings."""
    source = path.read_text()
    docstrings = {
        (node.body[0].lineno, node.body[0].end_lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        inside = any(first <= token.start[0] <= (last or first) for first, last in docstrings)
        if token.type in (tokenize.NAME, tokenize.STRING) and not inside:
            yield token.start[0], token.string


def device_names(path: Path) -> list[str]:
    """Device names in a file, as "file:line: token"."""
    name = str(path.relative_to(APP.parent))
    allowed = SGLANG_NAMES | ALLOWED.get(name, set())
    return [
        f"{name}:{line}: {text}"
        for line, text in tokens(path)
        if NAMES.search(text) and text.strip("\"'") not in allowed
    ]


def test_shared_code_names_no_device() -> None:
    outside = [path for path in APP.rglob("*.py") if SEAM not in path.parents and path not in DRIVER_CHECKS]
    assert [name for path in outside for name in device_names(path)] == []


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_every_kind_has_a_complete_value(kind: DeviceKind) -> None:
    device = device_of(kind)
    assert device.kind is kind
    assert device.engine_flags["device"] == device.torch_type == kind.name
    assert device.push_seconds_per_gb > 0
    assert device.shares_memory == (device.card_memory_gib is not None)
    assert device.shares_memory == (device.visibility is not None)


def test_only_the_cpu_reports_the_memory_of_this_machine() -> None:
    memory = device_of(DeviceKind.cpu).memory_gib()
    assert memory is not None
    assert 0.5 < memory < 65_536
    assert device_of(DeviceKind.npu).memory_gib() is None


def test_a_missing_device_is_refused() -> None:
    with refused("device", "npu", "torch_npu"):
        device_of(DeviceKind.npu).require()


@pytest.mark.parametrize(
    ("kind", "name", "peak"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", 989.0),
        ("cuda", "NVIDIA H100 PCIe", 756.0),
        ("cuda", "NVIDIA H20", 148.0),
        ("cuda", "NVIDIA GB200", None),
        ("npu", "Ascend910_9372", None),
    ],
)
def test_the_peak_is_that_of_the_device_or_unknown(kind: str, name: str, peak: float | None) -> None:
    assert device_of(DeviceKind[kind]).peak_tflops_of(name) == peak


@pytest.mark.parametrize(
    ("name", "cube_cores", "gigahertz"),
    [
        ("Ascend910B1", 24, 1.85),
        ("Ascend910B3", 20, 1.8),
        ("Ascend910B4", 20, 1.5),
        ("Ascend910_9382", 24, 1.8),
        ("Ascend910_9362", 20, 1.5),
    ],
)
def test_the_peak_of_an_npu_is_that_of_its_cores_in_canns_platform_files(
    name: str, cube_cores: int, gigahertz: float
) -> None:
    peak = cube_cores * 16**3 * 2 * gigahertz / 1000  # TFLOP/s: a core multiplies blocks of 16 × 16 × 16
    assert device_of(DeviceKind.npu).peak_tflops_of(name) == pytest.approx(peak, abs=0.05)

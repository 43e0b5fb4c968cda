"""The committed outcome of `python -m tests.real_stack` is that of today's pins, checks and calls."""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.device import DeviceKind
from app.config.placement import PlacementKind
from tests.compose import composed
from tests.config.test_presets import EXPERIMENTS, MODELS
from tests.real_stack import cuda, npu, record
from tests.real_stack.check import ROOT, Check, run_all
from tests.real_stack.server_args import cases
from tests.real_stack.stub import NO_DEVICE, defined, stub_cuda_driver

STACKS = {"cuda": cuda, "npu": npu}
AGAIN = "stale: run python -m tests.real_stack {}"


def recorded(device: str) -> dict[str, Any]:
    return record.read(record.path_of(device))


@pytest.mark.parametrize("device", STACKS)
def test_the_checked_packages_are_those_of_the_requirements(device: str) -> None:
    assert record.moved_pins(device, recorded(device)["packages"]) == {}, AGAIN.format(device)


@pytest.mark.parametrize("device", STACKS)
def test_every_check_ran_and_passed(device: str) -> None:
    outcomes = {name: outcome["outcome"] for name, outcome in recorded(device)["checks"].items()}
    assert outcomes == {check.name: "passed" for check in STACKS[device].CHECKS}, AGAIN.format(device)
    assert recorded(device)["unverified"] == STACKS[device].UNVERIFIED, AGAIN.format(device)


@pytest.mark.parametrize("device", STACKS)
def test_the_flags_of_every_preset_were_resolved(device: str) -> None:
    resolved = recorded(device)["checks"]["server_args"]["found"]
    assert set(resolved) == {case.name for case in cases(DeviceKind[device])}, AGAIN.format(device)


def test_every_call_of_ours_was_compared_with_torch_npu() -> None:
    checks = recorded("npu")["checks"]
    assert set(npu.calls_on_device_module()) == set(checks["device_module_calls"]["found"]["calls"])
    assert set(npu.calls_of_distributed()) == set(checks["collective_calls"]["found"]["calls"])


def test_the_record_is_stale_when_a_pin_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = {"sglang": "0.5.23", "torch-npu": "2.10.0.post7", "torch": "2.10.0+cpu"}
    for pins, moved in (
        ({"sglang": "0.5.23", "torch_npu": "2.10.0.post7", "torch": "2.10.0"}, set()),
        ({"sglang": "0.5.24"}, {"sglang"}),
        ({"sglang": "0.5.23", "renderers": "0.1.12"}, {"renderers"}),
    ):
        monkeypatch.setattr(record, "pins_of", lambda _, pins=pins: pins)
        assert set(record.moved_pins("cuda", checked)) == moved


@pytest.mark.parametrize("device", STACKS)
def test_the_cases_are_all_presets_on_one_four_and_eight_devices(device: str) -> None:
    found = cases(DeviceKind[device])
    names = {case.name for case in found}
    assert {f"experiment={name}" for name in EXPERIMENTS if name.startswith(device)} <= names
    for model in MODELS:
        for placement in PlacementKind:
            of_model = [case for case in found if f"model={model}" in case.overrides and placement.name in case.name]
            assert {case.devices for case in of_model} >= ({1, 4, 8} if placement is PlacementKind.colocate else {4, 8})
    for case in found:
        assert composed(*case.overrides).device_count == case.devices, case


def test_a_failing_check_does_not_stop_the_others(tmp_path: Path) -> None:
    def no_such_check() -> None: ...

    checks = [Check(no_such_check, timeout_s=60), Check(cuda.requirements, timeout_s=60)]
    outcomes = run_all("cuda", checks, Path(sys.executable), ROOT, tmp_path)
    assert [outcome["outcome"] for outcome in outcomes.values()] == ["failed", "passed"]
    assert "StopIteration" in outcomes["no_such_check"]["error"]
    assert outcomes["requirements"]["found"]["renderers"] == "0.1.12"


def test_the_stub_driver_loads_and_reports_no_device(tmp_path: Path) -> None:
    library = stub_cuda_driver(tmp_path) / "libcuda.so.1"
    assert {"cuInit", "cuDeviceGet"} <= defined(library)
    assert ctypes.CDLL(str(library)).cuInit(0) == NO_DEVICE


def test_a_call_that_does_not_fit_is_found() -> None:
    module = SimpleNamespace(one=lambda a, *, b=0: None)
    assert npu.misfit(module, "one", {(1, ()), (1, ("b",))}) is None
    assert "unexpected keyword" in str(npu.misfit(module, "one", {(1, ("c",))}))
    assert "too many positional" in str(npu.misfit(module, "one", {(2, ())}))
    assert npu.misfit(module, "two", {(0, ())}) == "missing"

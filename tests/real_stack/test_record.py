"""The committed outcome of `python -m tests.real_stack` is that of today's pins, checks and calls."""

import json
from typing import Any

import pytest
import torch

from app.config.device import DeviceKind
from tests.real_stack import cuda, npu, record
from tests.real_stack.server_args import cases
from tests.standin import elementwise_double

STACKS = {"cuda": cuda, "npu": npu}
AGAIN = "stale: run python -m tests.real_stack {}"


def recorded(device: str) -> dict[str, Any]:
    return json.loads(record.path_of(device).read_text())


@pytest.mark.parametrize("device", STACKS)
def test_the_checked_packages_are_those_of_the_requirements(device: str) -> None:
    assert record.moved_pins(device, recorded(device)["packages"]) == {}, AGAIN.format(device)


@pytest.mark.parametrize("device", STACKS)
def test_every_check_ran_and_passed(device: str) -> None:
    outcomes = {name: outcome["outcome"] for name, outcome in recorded(device)["checks"].items()}
    assert outcomes == {check.name: "passed" for check in STACKS[device].CHECKS}, AGAIN.format(device)


@pytest.mark.parametrize("device", STACKS)
def test_the_flags_of_every_preset_were_resolved_on_one_four_and_eight_devices(device: str) -> None:
    resolved = recorded(device)["checks"]["server_args"]["found"]
    assert set(resolved) == {case.name for case in cases(DeviceKind[device])}, AGAIN.format(device)


def test_every_call_of_ours_was_compared_with_torch_npu() -> None:
    checks = recorded("npu")["checks"]
    assert set(npu.calls_on_device_module()) <= set(checks["device_module_calls"]["found"]["calls"])
    assert set(npu.calls_of_distributed()) == set(checks["collective_calls"]["found"]["calls"])


def test_the_doubles_of_fused_operators_have_torch_npus_schemas() -> None:
    schemas = recorded("npu")["checks"]["elementwise"]["found"]["schemas"]
    doubles = {name: getattr(torch.ops.npu, name).default._schema for name in elementwise_double.KERNELS}
    assert {name: str(schema).removeprefix(f"npu::{name}") for name, schema in doubles.items()} == schemas

"""Checks of the device: driver, toolkit, environment variables, and the memory plan. torch is not imported."""

import os
import shutil
import subprocess
from collections.abc import Iterator

from app.config import RunConfig
from app.config.device import DeviceKind
from app.device import Device
from app.device.process_environment import EXPANDABLE
from app.mode.doctor import ascend, nvidia
from app.mode.doctor.software import uses_memory_saver
from app.mode.finding import CheckStatus, Finding, outcome
from app.mode.plan.memory import plan_memory
from app.model.architecture import architecture_of, unknown_shapes
from app.rollout.server_args import engine_flags
from app.utils.units import GIB

TOOLKIT_TIMEOUT_S = 30
OF_KIND = {DeviceKind.cuda: nvidia.checks, DeviceKind.npu: ascend.checks}


def hardware(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check driver and toolkit, and whether the memory plan fits."""
    if device.toolkit is not None:
        yield _toolkit(device.toolkit)
    if device.kind in OF_KIND:
        yield from OF_KIND[device.kind](config, device)
    yield _memory(config, device)


def variables(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check the current variables of the collective library and the allocator."""
    ours = {**device.trainer_env, **device.engine_env}
    conflicts = {name: value for name, value in ours.items() if os.environ.get(name, value) != value}
    for name, value in conflicts.items():
        message = f"{name}={os.environ[name]} is overridden by {value}"
        yield Finding("variables", message, CheckStatus.warn, "unset it, or change app/device if your value is right")
    if ours and not conflicts:
        yield Finding("variables", f"no conflict with the {len(ours)} variables that the run sets")

    for name in device.allocator_variables:
        if uses_memory_saver(config, device) and EXPANDABLE in os.environ.get(name, ""):
            message = f"{name} sets {EXPANDABLE}; trainer and engines start without it"
            hint = "nothing to do: neither the memory saver nor weight_sync.transport=ipc supports it"
            yield Finding("allocator", message, CheckStatus.warn, hint)

    if config.cluster.address is not None:
        for name, value in device.machine_env.items():
            hint = f"start Ray on every node with {name}={value} (launch/ray_cluster.sh does)"
            yield outcome("cluster", os.environ.get(name) == value, name, hint, otherwise=CheckStatus.warn)


def _toolkit(command: tuple[str, ...]) -> Finding:
    name = command[0]
    hint = f"install the driver, or run where {name} works"
    if shutil.which(name) is None:
        return Finding(name, "not found", CheckStatus.fail, hint)
    try:
        result = subprocess.run(command, capture_output=True, timeout=TOOLKIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        late = f"no answer within {TOOLKIT_TIMEOUT_S} s"
        return Finding(name, late, CheckStatus.fail, "the driver hangs; see its log")
    return outcome(name, result.returncode == 0, f"exit code {result.returncode}", hint)


def _memory(config: RunConfig, device: Device) -> Finding:
    """Check the peak phase of the memory plan. The plan is an estimate, so this warns and never fails."""
    model = architecture_of(config.model)
    if model is None:
        return Finding("memory", unknown_shapes(config.model), CheckStatus.warn, "see mode=plan")

    plan = plan_memory(config, device, model, engine_flags(config, device))
    peak = plan.peak_phase
    total = plan.capacity.bytes
    message = f"{peak.device}, {peak.name}: {peak.bytes / GIB:.1f} of {total / GIB:.1f} GiB ({plan.capacity.source})"
    hint = "mode=plan shows the breakdown; use more devices or a smaller trainer.tokens_per_microbatch"
    return outcome("memory", peak.bytes <= total, message, hint, otherwise=CheckStatus.warn)

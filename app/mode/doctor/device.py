"""Checks of the device: driver, toolkit, devices visible to torch, environment variables, and the memory plan."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from app.config import RunConfig
from app.config.device import DeviceKind
from app.config.placement import PlacementKind
from app.device import Device
from app.device.allocator import EXPANDABLE
from app.errors import ConfigError
from app.mode.doctor.finding import Check, CheckStatus, check
from app.mode.doctor.nvidia import nvidia_driver, nvidia_toolkit
from app.mode.plan.memory import devices, plan_memory
from app.model.architecture import architecture_of, unknown_shapes
from app.rollout.server_args import engine_flags
from app.utils.units import GIB

TOOLKIT_TIMEOUT_S = 30


def hardware(config: RunConfig, device: Device) -> Iterator[Check]:
    """Check driver, toolkit, number of devices, and whether the memory plan fits."""
    if device.toolkit is not None:
        yield _toolkit(device.toolkit)
    if device.kind is DeviceKind.cuda:
        yield from nvidia_driver()
        if not config.rollout.urls:
            yield from nvidia_toolkit(memory_saver=_uses_memory_saver(config, device))
    for path in device.driver_paths:
        exists = Path(path).exists()
        hint = "install the driver, or mount it into the container (launch/docker.sh shows how)"
        yield check("driver", exists, path if exists else f"{path} is missing", hint)
    if device.toolkit_variable is not None:
        yield _toolkit_environment(device.toolkit_variable)
    yield _device_count(config, device)
    yield _memory(config, device)


def environment(config: RunConfig, device: Device) -> Iterator[Check]:
    """Check the current variables of the collective library and the allocator."""
    ours = {**device.trainer_env, **device.engine_env}
    conflicts = {name: value for name, value in ours.items() if os.environ.get(name, value) != value}
    for name, value in conflicts.items():
        message = f"{name}={os.environ[name]} is overridden by {value}"
        yield Check("environment", CheckStatus.warn, message, "unset it, or change app/device if your value is right")
    if ours and not conflicts:
        message = f"no conflict with the {len(ours)} variables that the run sets"
        yield Check("environment", CheckStatus.ok, message)

    if device.visibility is not None and device.visibility in os.environ:
        yield _visible(device.visibility, os.environ[device.visibility], devices(config))

    for name in device.allocator_variables:
        if _uses_memory_saver(config, device) and EXPANDABLE in os.environ.get(name, ""):
            message = f"{name} sets {EXPANDABLE}; trainer and engines start without it"
            hint = "nothing to do: neither the memory saver nor weight_sync.transport=ipc supports it"
            yield Check("allocator", CheckStatus.warn, message, hint)

    if config.cluster.address is not None:
        for name, value in device.machine_env.items():
            hint = f"start Ray on every node with {name}={value} (launch/ray_cluster.sh does)"
            yield check("cluster", os.environ.get(name) == value, name, hint, otherwise=CheckStatus.warn)


def _uses_memory_saver(config: RunConfig, device: Device) -> bool:
    return config.placement.kind is PlacementKind.colocate and config.offload.engine and device.shares_memory


def _toolkit(command: tuple[str, ...]) -> Check:
    name = command[0]
    hint = f"install the driver, or run where {name} works"
    if shutil.which(name) is None:
        return Check(name, CheckStatus.fail, "not found", hint)
    try:
        result = subprocess.run(command, capture_output=True, timeout=TOOLKIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Check(name, CheckStatus.fail, f"no answer within {TOOLKIT_TIMEOUT_S} s", "the driver hangs; see its log")
    return check(name, result.returncode == 0, f"exit code {result.returncode}", hint)


def _toolkit_environment(variable: str) -> Check:
    folder = os.environ.get(variable)
    good = folder is not None and Path(folder).is_dir()
    message = f"{variable}={folder}" if folder else f"{variable} is not set"
    return check("toolkit", good, message, "source the toolkit's set_env.sh before Python")


def _visible(variable: str, selection: str, needed: int) -> Check:
    """Check an inherited selection of devices."""
    count = len([index for index in selection.split(",") if index.strip()])
    message = f"{variable}={selection} leaves {count} device(s), the run needs {needed}"
    return check("visible devices", count >= needed, message, f"select {needed} devices, or unset {variable}")


def _device_count(config: RunConfig, device: Device) -> Check:
    """Compare the devices of this machine with those that the run needs; cluster nodes have further ones."""
    needed = devices(config)
    try:
        device.require()
    except ConfigError as error:
        return Check("devices", CheckStatus.fail, str(error), f"the run needs {needed} {device.kind.name} device(s)")

    available = device.count()
    message = f"{available} {device.kind.name} available, the run needs {needed}"
    # CPU "devices" are shares of one machine, and a cluster may have the rest
    if not device.shares_memory or config.cluster.address is not None:
        return Check("devices", CheckStatus.ok, message)
    key = "placement.devices" if config.placement.kind is PlacementKind.colocate else "placement.rollout_devices"
    return check("devices", available >= needed, message, f"lower {key}, or join a cluster with cluster.address")


def _memory(config: RunConfig, device: Device) -> Check:
    """Check the peak phase of the memory plan. The plan is an estimate, so this warns and never fails."""
    model = architecture_of(config.model)
    if model is None:
        return Check("memory", CheckStatus.warn, unknown_shapes(config.model), "see mode=plan")

    plan = plan_memory(config, device, model, engine_flags(config, device))
    peak = plan.peak_phase
    total = plan.capacity.bytes
    message = f"{peak.device}, {peak.name}: {peak.bytes / GIB:.1f} of {total / GIB:.1f} GiB ({plan.capacity.source})"
    hint = "mode=plan shows the breakdown; use more devices or a smaller trainer.tokens_per_microbatch"
    return check("memory", peak.bytes <= total, message, hint, otherwise=CheckStatus.warn)

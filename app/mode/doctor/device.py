"""The doctor on the device: driver, toolkit, what torch sees, what the environment says, whether the plan fits."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.device import Device
from app.errors import ConfigError
from app.mode.doctor.finding import Finding, Verdict, judged
from app.mode.plan import memory as plan_memory
from app.mode.plan.trainer_memory import GIB
from app.model.architecture import architecture_of
from app.rollout.server_args import engine_flags

TOOLKIT_SECONDS = 30
EXPANDABLE = "expandable_segments"


def hardware(config: RunConfig, device: Device) -> Iterator[Finding]:
    if device.toolkit is not None:
        yield _toolkit(device.toolkit)
    for path in device.driver_paths:
        advice = "install the driver; into a container it is mounted (launch/docker.sh shows how)"
        yield judged("driver", Path(path).exists(), path if Path(path).exists() else f"{path} is missing", advice)
    if device.toolkit_variable is not None:
        yield _sourced(device.toolkit_variable)
    yield _seen(config, device)
    yield _memory(config, device)


def environment(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Variables of the collective library and the allocator, as they are now."""
    ours = {**device.trainer_env, **device.engine_env}
    other = {name: value for name, value in ours.items() if os.environ.get(name, value) != value}
    for name, value in other.items():
        told = f"{name}={os.environ[name]} gives way to {value}"
        yield Finding("environment", Verdict.warn, told, "unset it, or change it in app/device if yours is right")
    if ours and not other:
        yield Finding("environment", Verdict.ok, f"nothing is set against the {len(ours)} variables that the run sets")
    if device.visibility is not None and device.visibility in os.environ:
        yield _visible(device.visibility, os.environ[device.visibility], plan_memory.devices(config))
    saving = config.placement.kind is PlacementKind.colocate and config.offload.engine and device.shares_memory
    for name in device.allocator_variables:
        if saving and EXPANDABLE in os.environ.get(name, ""):
            told = f"{name} asks for {EXPANDABLE}, which engines are started without"
            yield Finding(
                "allocator", Verdict.warn, told, "nothing: the memory saver refuses them, the trainer has them"
            )
    if config.cluster.address is not None:
        for name, value in device.machine_env.items():
            advice = f"start Ray on every node with {name}={value} (launch/ray_cluster.sh does)"
            yield judged("cluster", os.environ.get(name) == value, name, advice, otherwise=Verdict.warn)


def _toolkit(command: tuple[str, ...]) -> Finding:
    name = command[0]
    advice = f"install the driver, or run where {name} works"
    if shutil.which(name) is None:
        return Finding(name, Verdict.fail, "not found", advice)
    try:
        asked = subprocess.run(command, capture_output=True, timeout=TOOLKIT_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(name, Verdict.fail, f"no answer within {TOOLKIT_SECONDS} s", "the driver hangs; see its log")
    return judged(name, asked.returncode == 0, f"exit code {asked.returncode}", advice)


def _sourced(variable: str) -> Finding:
    folder = os.environ.get(variable)
    good = folder is not None and Path(folder).is_dir()
    told = f"{variable}={folder}" if folder else f"{variable} is not set"
    return judged("toolkit", good, told, "source the toolkit's set_env.sh before Python")


def _visible(variable: str, chosen: str, needed: int) -> Finding:
    """A selection of devices that the run inherits."""
    count = len([index for index in chosen.split(",") if index.strip()])
    told = f"{variable}={chosen} leaves {count} device(s), the run takes {needed}"
    return judged("visible devices", count >= needed, told, f"name {needed} of them, or unset {variable}")


def _seen(config: RunConfig, device: Device) -> Finding:
    """Devices here against the ones that the run takes; on a cluster the other nodes have theirs."""
    needed = plan_memory.devices(config)
    try:
        device.require()
    except ConfigError as error:
        return Finding("devices", Verdict.fail, str(error), f"the run takes {needed} {device.kind.name} device(s)")
    have = device.count()
    told = f"{have} {device.kind.name} here, the run takes {needed}"
    if not device.shares_memory or config.cluster.address is not None:
        return Finding("devices", Verdict.ok, told)  # shares of a CPU, or the cluster has the rest
    key = "placement.devices" if config.placement.kind is PlacementKind.colocate else "placement.rollout_devices"
    return judged("devices", have >= needed, told, f"lower {key}, or join a cluster with cluster.address")


def _memory(config: RunConfig, device: Device) -> Finding:
    """The tightest phase of the plan; an estimate, so that it warns and never fails."""
    model = architecture_of(config.model)
    if model is None:
        return Finding("memory", Verdict.warn, f"the shapes of {config.model.path} are not known here", "see mode=plan")
    room, trainer, engine = plan_memory.of(config, device, model, engine_flags(config, device))
    worst = plan_memory.tightest(plan_memory.phases(config, device, trainer, engine))
    told = f"{worst.device}, {worst.name}: {worst.bytes / GIB:.1f} of {room.bytes / GIB:.1f} GiB ({room.source})"
    advice = "mode=plan shows what takes it; more devices, or a smaller trainer.tokens_per_microbatch"
    return judged("memory", worst.bytes <= room.bytes, told, advice, otherwise=Verdict.warn)

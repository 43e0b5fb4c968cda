"""Ray: start or join a cluster, reserve the devices, and give all of it back.

Devices are reserved in one placement group, so that a run has all of them or none. colocate: a bundle a device, shared
by a trainer rank and the engine rank on the same card. fully_async: a bundle a trainer rank and a bundle an engine, of
as many devices as it is wide, which keeps an engine on one node.
"""

import logging
import os
import signal
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import RunConfig
from app.device import Device
from app.device.schema import DeviceKind
from app.errors import RunError
from app.placement.schema import PlacementKind

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Reservation:
    """The bundles of a run: the first `ranks` belong to trainer ranks, engine `e` stands in `engine_bundle(e)`."""

    group: PlacementGroup
    config: RunConfig
    device: Device

    def rank_options(self, rank: int) -> dict[str, Any]:
        """Ray options of a trainer rank's actor."""
        return {**self._resources(1), **self._in(rank)}

    def engine_options(self, engine: int) -> dict[str, Any]:
        """Ray options of an engine host's actor; in colocate the ranks hold the devices, so it asks for none."""
        placement, width = self.config.placement, self.config.rollout.tensor_parallel
        if placement.kind is PlacementKind.colocate:
            return {"num_cpus": 0, **self._in(engine * width)}
        return {**self._resources(width), **self._in(placement.trainer_ranks + engine)}

    def _in(self, bundle: int) -> dict[str, Any]:
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)}

    def _resources(self, count: int) -> dict[str, Any]:
        if self.device.resource == "CPU":
            return {"num_cpus": count}
        if self.device.resource == "GPU":
            return {"num_cpus": 1, "num_gpus": count}
        return {"num_cpus": 1, "resources": {self.device.resource: count}}


def bundles(config: RunConfig, device: Device) -> list[dict[str, float]]:
    """What each bundle needs."""

    def bundle(count: int) -> dict[str, float]:
        return {"CPU": count} if device.resource == "CPU" else {"CPU": 1.0, device.resource: count}

    ranks = [bundle(1) for _ in range(config.placement.trainer_ranks)]
    if config.placement.kind is PlacementKind.colocate or config.rollout.urls:
        return ranks
    return ranks + [bundle(config.rollout.tensor_parallel) for _ in range(config.engines)]


def connect(config: RunConfig, device: Device) -> None:
    """Start a local Ray, or join the cluster at `cluster.address`."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    # our ranks and engines are not background work; an actor without devices of its own sees them all
    os.environ |= {"RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it announces its default, token mode
    ours = signal.getsignal(signal.SIGTERM)
    try:
        _init(config, device, quiet)
    finally:
        signal.signal(signal.SIGTERM, ours)  # Ray's own handler would exit without ending what the run started


def _init(config: RunConfig, device: Device, quiet: dict[str, Any]) -> None:
    if config.cluster.address is not None:
        try:
            ray.init(address=config.cluster.address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise RunError(f"cluster.address={config.cluster.address} cannot be joined: {error}") from error
        return
    needed = sum(int(bundle.get("CPU", 0)) for bundle in bundles(config, device))
    cores = max(needed, os.cpu_count() or 1)  # on CPU a device is a share of the cores
    npus: dict[str, float] = {device.resource: device.count()} if device.kind is DeviceKind.npu else {}
    ray.init(
        num_cpus=cores,
        resources=npus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **quiet,
    )


def reserve(config: RunConfig, device: Device) -> Reservation:
    """Wait for the devices; the error says what is missing."""
    wanted = bundles(config, device)
    group = placement_group(wanted, strategy="PACK")
    if not group.wait(config.cluster.timeout_s):
        remove_placement_group(group)
        total, have = sum(bundle.get(device.resource, 0) for bundle in wanted), ray.cluster_resources()
        raise RunError(
            f"the run needs {total:g} {device.resource} (placement={config.placement.kind.name}), the cluster "
            f"has {have.get(device.resource, 0):g}, {ray.available_resources().get(device.resource, 0):g} free; "
            f"waited cluster.timeout_s={config.cluster.timeout_s:.0f} s."
        )
    return Reservation(group, config, device)

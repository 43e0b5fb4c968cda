"""Ray: start or join a cluster, reserve the devices, and give all of it back.

Devices are reserved in one placement group, so that a run has all of them or none. colocate: a bundle a device, shared
by a trainer rank and the engine rank on the same card. fully_async: a bundle a trainer rank and a bundle an engine, of
as many devices as it is wide, which keeps an engine on one node. Ranks stand in the order of nodes and devices, so that
those of an engine in colocate are neighbours.
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
from app.config.device import DeviceKind
from app.config.placement import PlacementKind
from app.device import Device
from app.errors import RunError

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BundleLocation:
    """Where a bundle is."""

    node: str
    devices: tuple[str, ...]  # their numbers on that node; none on a CPU


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """The bundles of a run: the first `trainer_ranks` belong to the trainer, in fully_async the others to engines."""

    group: PlacementGroup
    config: RunConfig
    device: Device
    places: tuple[BundleLocation, ...]  # by bundle

    def rank_options(self, rank: int) -> dict[str, Any]:
        """Ray options of a trainer rank's actor."""
        return {**resources(self.device, 1), **self._in(self._bundle(rank))}

    def engine_options(self, engine: int) -> dict[str, Any]:
        """Ray options of an engine host's actor; in colocate the ranks hold the devices, so it asks for none."""
        place = self._in(self._engine_bundles(engine)[0])
        if self.config.placement.kind is PlacementKind.colocate:
            return {"num_cpus": 0, **place}
        return {**resources(self.device, self.config.rollout.tensor_parallel), **place}

    def engine_environment(self, engine: int) -> dict[str, str]:
        """Shows an engine its own devices and no others. Raises `RunError` if they are on several nodes."""
        places = [self.places[bundle] for bundle in self._engine_bundles(engine)]
        if self.device.visibility is None:
            return {}
        if len({place.node for place in places}) > 1:
            width = self.config.rollout.tensor_parallel
            raise RunError(
                f"engine {engine} needs rollout.tensor_parallel={width} devices of one node, and the nodes of this "
                f"cluster do not hold a multiple of {width} each: take another width, or reserve whole nodes."
            )
        return {self.device.visibility: ",".join(number for place in places for number in place.devices)}

    def _engine_bundles(self, engine: int) -> list[int]:
        placement, width = self.config.placement, self.config.rollout.tensor_parallel
        if placement.kind is PlacementKind.colocate:
            return [self._bundle(rank) for rank in range(engine * width, (engine + 1) * width)]
        return [placement.trainer_ranks + engine]

    def _bundle(self, rank: int) -> int:
        def standing(bundle: int) -> tuple[str, list[tuple[int, str]]]:
            place = self.places[bundle]
            return place.node, [(len(number), number) for number in place.devices]  # 2 before 10

        return sorted(range(self.config.placement.trainer_ranks), key=standing)[rank]

    def _in(self, bundle: int) -> dict[str, Any]:
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)}


def resources(device: Device, count: int) -> dict[str, Any]:
    """Ray options of what holds so many devices."""
    if device.resource == "CPU":
        return {"num_cpus": count}
    if device.resource == "GPU":
        return {"num_cpus": 1, "num_gpus": count}
    return {"num_cpus": 1, "resources": {device.resource: count}}


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
        address="local",  # not the one that somebody else may run on this machine
        num_cpus=cores,
        resources=npus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **quiet,
    )


def reserve(config: RunConfig, device: Device) -> DevicePlacement:
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
    return DevicePlacement(group, config, device, _places(group, wanted, config, device))


def _places(
    group: PlacementGroup, wanted: list[dict[str, float]], config: RunConfig, device: Device
) -> tuple[BundleLocation, ...]:
    """Asks in every bundle: Ray gives a bundle the same devices for as long as it exists. Cores have no numbers."""
    if device.resource == "CPU":
        return tuple(BundleLocation("", ()) for _ in wanted)
    asked = [
        ray.remote(_place)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            **resources(device, int(parts[device.resource])),
        )
        .remote(device.resource)
        for bundle, parts in enumerate(wanted)
    ]
    try:
        return tuple(ray.get(asked, timeout=config.cluster.timeout_s))
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise RunError(
            f"the reserved bundles did not say where they are within cluster.timeout_s={config.cluster.timeout_s:.0f} s"
        ) from None


def _place(resource: str) -> BundleLocation:
    context = ray.get_runtime_context()
    return BundleLocation(context.get_node_id(), tuple(map(str, context.get_accelerator_ids().get(resource, ()))))

"""The devices of a run, reserved as one Ray placement group: a run gets all of them or none.

    colocate      one bundle per device, shared by a trainer rank and the engine rank on the same device
    fully_async   one bundle per trainer rank, then one bundle per engine of `rollout.tensor_parallel` devices

A teacher that the run starts (`teacher.path`) has the last bundle.

Ray moves the bundles of a lost node to another one, where devices may have other numbers. So ranks, and engines with a
bundle of their own, ask Ray for their devices when they start. Where engines share those of the ranks, `locate_ranks`
asks for them.

Invariants:
    - Trainer ranks are numbered by node, then by device: in colocate the ranks of an engine are neighbors.
    - All devices of an engine are on one node.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import RunConfig
from app.device import Device
from app.errors import RunError, TrainerError, one_line


@dataclass(frozen=True, slots=True)
class BundleLocation:
    """Node and devices of a bundle."""

    node: str  # Ray's node id
    devices: tuple[str, ...]  # device numbers on the node; empty on CPU


@dataclass(slots=True)
class DevicePlacement:
    """The reserved bundles. The trainer's come first; in fully_async the engines' follow."""

    group: PlacementGroup
    config: RunConfig
    device: Device
    locations: tuple[BundleLocation, ...]  # of the trainer's bundles, by bundle index

    async def locate_ranks(self) -> None:
        """Locate the trainer's bundles again, without ranks. Raises `TrainerError` after `trainer.timeout_s`."""
        timeout_s = self.config.trainer.timeout_s
        try:
            self.locations = await _locate_bundles(self.group, self.config, self.device, timeout_s)
        except (TimeoutError, RayError) as error:
            late = f"within trainer.timeout_s={timeout_s:.0f} s"
            raise TrainerError(f"the trainer's devices were not reserved again {late}: {one_line(error)}") from error

    def rank_options(self, rank: int) -> dict[str, Any]:
        return {**resources(self.device, 1), **self._in_bundle(self._bundle_of_rank(rank))}

    def engine_options(self, engine: int) -> dict[str, Any]:
        """Return the Ray actor options of an engine host. In colocate it reserves no devices: the ranks have them."""
        bundle = self._in_bundle(self._bundles_of_engine(engine)[0])
        if self.config.placement.colocated:
            return {"num_cpus": 0, **bundle}
        return {**resources(self.device, self.config.rollout.tensor_parallel), **bundle}

    def teacher_options(self) -> dict[str, Any]:
        last = len(bundles(self.config, self.device)) - 1
        return {**resources(self.device, self.config.teacher_devices), **self._in_bundle(last)}

    def engine_environment(self, engine: int) -> dict[str, str]:
        """Return the environment that limits an engine to its ranks' devices; `RunError` if several nodes have them."""
        if self.device.visibility is None or not self.config.shared_devices:
            return {}

        locations = [self.locations[bundle] for bundle in self._bundles_of_engine(engine)]
        if len({location.node for location in locations}) > 1:
            width = self.config.rollout.tensor_parallel
            raise RunError(
                f"engine {engine} needs rollout.tensor_parallel={width} devices on one node, but its devices are on "
                f"several: choose a width that divides the devices of each node, or reserve whole nodes."
            )
        return {self.device.visibility: ",".join(number for location in locations for number in location.devices)}

    def _bundles_of_engine(self, engine: int) -> list[int]:
        width = self.config.rollout.tensor_parallel
        if self.config.placement.colocated:
            return [self._bundle_of_rank(rank) for rank in range(engine * width, (engine + 1) * width)]
        return [self.config.placement.trainer_ranks + engine]

    def _bundle_of_rank(self, rank: int) -> int:
        def node_and_devices(bundle: int) -> tuple[str, list[tuple[int, str]]]:
            location = self.locations[bundle]
            return location.node, [(len(number), number) for number in location.devices]  # 2 before 10

        return sorted(range(self.config.placement.trainer_ranks), key=node_and_devices)[rank]

    def _in_bundle(self, bundle: int) -> dict[str, Any]:
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)}


def resources(device: Device, count: int) -> dict[str, Any]:
    """Return the Ray options of an actor or task with this many devices."""
    if device.resource == "CPU":
        return {"num_cpus": count}
    if device.resource == "GPU":
        return {"num_cpus": 1, "num_gpus": count}
    return {"num_cpus": 1, "resources": {device.resource: count}}


def bundles(config: RunConfig, device: Device) -> list[dict[str, float]]:
    """Return the Ray resources of each bundle. Servers of `rollout.urls` need none."""

    def bundle(count: int) -> dict[str, float]:
        return {"CPU": count} if device.resource == "CPU" else {"CPU": 1.0, device.resource: count}

    ranks = [bundle(1) for _ in range(config.placement.trainer_ranks)]
    teacher = [bundle(config.teacher_devices)] if config.teacher_devices else []
    if config.placement.colocated or config.rollout.urls:
        return ranks + teacher
    return ranks + [bundle(config.rollout.tensor_parallel) for _ in range(config.engines)] + teacher


async def reserve(config: RunConfig, device: Device) -> DevicePlacement:
    """Reserve the devices of a run. Can be cancelled. Raises `RunError` after `cluster.timeout_s`."""
    wanted = bundles(config, device)
    group = placement_group(wanted, strategy="PACK")
    timeout_s = config.cluster.timeout_s
    try:
        # not `group.wait`: it blocks the event loop, and cuts its timeout to whole seconds
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        remove_placement_group(group)
        needed = sum(bundle.get(device.resource, 0) for bundle in wanted)
        total = ray.cluster_resources().get(device.resource, 0)
        free = ray.available_resources().get(device.resource, 0)
        raise RunError(
            f"the run needs {needed:g} {device.resource} (placement={config.placement.kind.name}), the cluster has "
            f"{total:g}, {free:g} free; waited cluster.timeout_s={timeout_s:.0f} s."
        ) from None

    try:
        locations = await _locate_bundles(group, config, device, timeout_s)
    except (TimeoutError, RayError) as error:
        remove_placement_group(group)
        late = f"within cluster.timeout_s={timeout_s:.0f} s"
        raise RunError(f"the reserved bundles did not report their devices {late}: {one_line(error)}") from error
    return DevicePlacement(group, config, device, locations)


async def _locate_bundles(
    group: PlacementGroup, config: RunConfig, device: Device, timeout_s: float
) -> tuple[BundleLocation, ...]:
    """Run a task in each of the trainer's bundles that reports its location. Raises `TimeoutError`."""
    ranks = range(config.placement.trainer_ranks)
    if device.resource == "CPU":
        return tuple(BundleLocation("", ()) for _ in ranks)

    locations = [
        ray.remote(_own_location)
        .options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank), **resources(device, 1))
        .remote(device.resource)
        for rank in ranks
    ]
    try:
        async with asyncio.timeout(timeout_s):
            return tuple([await location for location in locations])
    except TimeoutError:
        for location in locations:
            ray.cancel(location)
        raise


def _own_location(resource: str) -> BundleLocation:
    context = ray.get_runtime_context()
    return BundleLocation(context.get_node_id(), tuple(map(str, context.get_accelerator_ids().get(resource, ()))))

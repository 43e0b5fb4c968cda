"""Reserving the devices of a run: free ones are seen at once, missing ones are waited for until the deadline."""

import asyncio
from collections.abc import Iterator

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from app.cluster.placement_group import reserve
from app.device import device_of
from app.errors import RunError
from tests.compose import composed
from tests.waiting import until

CONFIG = composed("placement=colocate")
DEVICE = device_of(CONFIG.device.kind)


@pytest.fixture
def occupied(ray_session: None) -> Iterator[PlacementGroup]:
    """A placement group that holds all CPUs."""
    group = placement_group([{"CPU": 1}] * int(ray.cluster_resources()["CPU"]))
    ray.get(group.ready(), timeout=60)
    until(lambda: not ray.available_resources().get("CPU"), 60)  # Ray's count lags behind
    yield group
    remove_placement_group(group)


async def test_devices_that_are_freed_end_the_wait(occupied: PlacementGroup) -> None:
    CONFIG.cluster.timeout_s = 60.0
    reserving = asyncio.create_task(reserve(CONFIG, DEVICE))
    await asyncio.sleep(0.5)
    assert not reserving.done()
    remove_placement_group(occupied)
    remove_placement_group((await reserving).group)


def test_the_error_counts_the_devices_that_are_missing(occupied: PlacementGroup) -> None:
    CONFIG.cluster.timeout_s = 0.5
    total = ray.cluster_resources()["CPU"]
    with pytest.raises(RunError) as raised:
        asyncio.run(reserve(CONFIG, DEVICE))
    for part in ("needs 1 CPU", "placement=colocate", f"has {total:g}, 0 free", "cluster.timeout_s=0"):
        assert part in str(raised.value)

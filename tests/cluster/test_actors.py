"""The hosts of engines: their seeds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from app.cluster.actors import EngineFactory
from app.cluster.placement_group import reserve
from app.device import device_of
from tests.compose import composed


@pytest.fixture
def factory(ray_session: None, tmp_path: Path) -> Iterator[EngineFactory]:
    config = composed("placement=fully_async", "placement.rollout_devices=2", "seed=7")
    device = device_of(config.device.kind)
    placement = reserve(config, device)
    yield EngineFactory(config, device, tmp_path, tmp_path, placement)
    remove_placement_group(placement.group)


def test_engines_and_their_replacements_sample_different_noise(factory: EngineFactory) -> None:
    hosts = [factory(index).actor for index in (0, 1, 0, 0)]
    seeds = ray.get([host.__ray_call__.remote(_seed) for host in hosts], timeout=120)
    assert len(set(seeds)) == 4
    for host in hosts:
        ray.kill(host)


def _seed(host: Any) -> object:
    return host.spec.server.flags["random-seed"]

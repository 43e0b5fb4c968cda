"""The hosts of engines and their seeds; the environment of trainer ranks."""

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from app.cluster.engine_factory import EngineFactory, engine_threads
from app.cluster.placement_group import reserve
from app.config.device import DeviceKind
from app.device import device_of
from app.start.session import make_trainer
from tests.compose import composed


@pytest.fixture
def factory(ray_session: None, tmp_path: Path) -> Iterator[EngineFactory]:
    config = composed("placement=fully_async", "placement.rollout_devices=2", "seed=7")
    device = device_of(config.device.kind)
    placement = asyncio.run(reserve(config, device))
    yield EngineFactory(config, device, tmp_path, tmp_path, placement, None)
    remove_placement_group(placement.group)


def test_engines_and_their_replacements_sample_different_noise(factory: EngineFactory) -> None:
    seeds = set()
    for index in (0, 1, 0, 0):
        host = factory(index).actor
        seeds.add(ray.get(host.__ray_call__.remote(lambda host: host.spec.server.flags["random-seed"]), timeout=120))
        ray.kill(host)  # its device is for one at a time
    assert len(seeds) == 4


def test_a_rank_sets_its_variables_before_torch_is_imported(
    factory: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)
    monkeypatch.setenv("CPU_AFFINITY_CONF", "0")
    device = replace(factory.device, trainer_defaults=device_of(DeviceKind.npu).trainer_defaults)
    trainer = make_trainer(factory.config, device, tmp_path, tmp_path, factory.placement)
    (rank,) = trainer.ranks
    look = rank.__ray_call__.remote(lambda _: (dict(os.environ), "torch" in sys.modules))
    variables, imported = ray.get(look, timeout=120)
    ray.kill(rank)
    assert not imported
    assert factory.device.trainer_env.items() <= variables.items()
    assert variables["PYTHONUTF8"] == "1"
    assert (variables["CPU_AFFINITY_CONF"], variables["TASK_QUEUE_ENABLE"]) == ("0", "2")


@pytest.mark.parametrize(
    ("cores", "overrides", "threads"),
    [
        (1, ["placement=colocate"], 1),
        (16, ["placement=colocate"], 16),  # the ranks are idle while engines generate
        (16, ["placement=colocate", "placement.devices=4"], 4),
        (16, ["placement=fully_async"], 8),  # the other half is the trainer's
        (16, ["placement=colocate", "algorithm=opd", "teacher.path=tiny"], 8),  # the teacher scores meanwhile
        (16, ["placement=fully_async", "algorithm=opd", "teacher.path=tiny", "teacher.devices=2"], 4),
    ],
)
def test_engines_on_a_cpu_divide_the_cores_that_ranks_do_not_use_at_the_same_time(
    cores: int, overrides: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed("device=cpu", *overrides)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert engine_threads(config, device_of(config.device.kind), 1)["OMP_NUM_THREADS"] == str(threads)

"""Ranks that Ray cannot build or schedule, and where a rank listens."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from app.errors import TrainerError
from app.trainer.remote import RemoteTrainer
from tests.model.support import save_qwen3
from tests.weight_sync.support import make_trainer

RAY_SLOTS = 8  # of `ray_session`


class Rank:
    """The first call of a rank."""

    def start(self) -> tuple[str, int]:
        return "127.0.0.1", 1


class RankWithoutDisk(Rank):
    def __init__(self) -> None:
        raise OSError("no space left on device: logs/trainer_1.log")


@pytest.fixture
def actors(ray_session: None) -> Iterator[list[Any]]:
    """Actors to be killed after the test."""
    made: list[Any] = []
    yield made
    for actor in made:
        ray.kill(actor)


def test_a_rank_that_cannot_be_built_is_named_with_its_error(actors: list[Any], tmp_path: Path) -> None:
    actors += [ray.remote(num_cpus=0)(each).remote() for each in (Rank, RankWithoutDisk)]
    trainer = RemoteTrainer(actors, timeout_s=60, logs=tmp_path)
    with pytest.raises(TrainerError) as failed:
        asyncio.run(trainer.setup())
    assert re.search("rank 1 .*start: OSError: .*logs/trainer_1.log", str(failed.value))
    assert trainer.broken
    with pytest.raises(TrainerError, match=r"begin_step: .*rank 1 "):
        asyncio.run(trainer.begin_step(version=1))


def test_a_rank_that_ray_never_schedules_misses_the_deadline_by_name(actors: list[Any], tmp_path: Path) -> None:
    actors += [ray.remote(num_cpus=slots)(Rank).remote() for slots in (0, RAY_SLOTS + 1)]
    ray.get(actors[0].start.remote(), timeout=60)  # only the other one is late
    trainer = RemoteTrainer(actors, timeout_s=3, logs=tmp_path)
    with pytest.raises(TrainerError) as late:
        asyncio.run(asyncio.wait_for(trainer.setup(), 60))
    assert "trainer rank 1 within trainer.timeout_s=3 s" in str(late.value)
    assert trainer.broken


async def test_a_rank_listens_for_the_others_at_the_address_of_its_node_only(actors: list[Any], tmp_path: Path) -> None:
    trainer = make_trainer(save_qwen3(tmp_path / "policy"), tmp_path)
    actors += trainer.ranks

    await trainer.setup()
    address, port = await trainer.source()
    pid = await trainer.ranks[0].pid.remote()
    listening = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [each.laddr.ip for each in listening if each.laddr.port == port] == [address]

"""The driver's face of the ranks, over real ranks in Ray: checkpoints through it, and a call that one rank fails."""

import asyncio
import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.checkpoint.manager import Checkpoints, RunState
from app.errors import TrainerError
from app.trainer.remote import RemoteTrainer
from app.types import ScoredGroup, StepReport
from tests.model.support import save_qwen3
from tests.trainer.support import VOCABULARY, scored_groups
from tests.weight_sync.support import make_trainer

TOO_LONG_S = 60.0  # what a call would hang for without being noticed is `timeout_s` of `make_trainer`: 120


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def trainer(ray_session: None, path: Path, tmp_path: Path) -> Iterator[RemoteTrainer]:
    import ray

    made = make_trainer(path, tmp_path, ranks=2)
    yield made
    for rank in made.ranks:
        ray.kill(rank)


def readable_by_one_rank(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """The last trajectory alone has a token that the model does not have, so that one rank fails in its forward."""
    *others, last = groups
    *kept, broken = last.group.trajectories
    tokens = np.full_like(broken.prompt.token_ids, VOCABULARY)
    broken = replace(broken, prompt=replace(broken.prompt, token_ids=tokens))
    return [*others, replace(last, group=replace(last.group, trajectories=(*kept, broken)))]


class Garbage:
    """Makes a cycle, which nothing but a collection frees."""

    def __init__(self, host: object):
        self.left: weakref.ref[Garbage] | None = None

    def make(self) -> bool:
        cycle = Garbage(None)
        cycle.itself = cycle  # type: ignore[attr-defined]
        self.left = weakref.ref(cycle)
        return gc.isenabled()

    def there(self) -> bool:
        assert self.left is not None
        return self.left() is not None


async def step(trainer: RemoteTrainer, version: int, groups: list[ScoredGroup]) -> StepReport:
    await trainer.begin_step(version=version)
    await trainer.add_groups(groups)
    return await trainer.finish_step()


@pytest.mark.soak
def test_two_ranks_save_restore_and_end_a_call_that_one_of_them_failed(trainer: RemoteTrainer, tmp_path: Path) -> None:
    groups = scored_groups(4, shortest=2)

    async def story() -> None:
        parameters = await trainer.setup()
        assert await trainer.checkpoint_bytes() == 12 * parameters
        await trainer.attach("garbage", Garbage)
        assert await trainer.call("garbage", Garbage.make) == [False, False]  # collected by hand alone
        assert await trainer.call("garbage", Garbage.there) == [True, True]
        await step(trainer, 1, groups)
        assert await trainer.call("garbage", Garbage.there) == [False, False]
        checkpoints = Checkpoints(tmp_path, keep=2)
        saved = await checkpoints.save(trainer, RunState(1, 1))
        beside = await step(trainer, 2, groups[:3])  # the write goes on meanwhile
        await checkpoints.wait()
        assert checkpoints.metrics["checkpoint/bytes"] > 12 * parameters
        assert await trainer.version() == 2
        await trainer.restore(saved, version=1)
        assert await trainer.version() == 1
        again = await step(trainer, 2, groups[:3])
        for name in ("loss/policy", "grad_norm", "entropy", "lr"):
            assert again.metrics[name] == beside.metrics[name], name

        await trainer.begin_step(version=3)
        for call in (trainer.capture(), trainer.restore(saved, version=1)):
            with pytest.raises(TrainerError, match="while a step is open: finish or abort it first"):
                await call
        assert not trainer.broken  # both ranks said so, and both go on
        began = time.monotonic()
        with pytest.raises(TrainerError, match=r"trainer rank \d failed during (add_groups|finish_step): IndexError"):
            await fail(trainer, groups)
        assert time.monotonic() - began < TOO_LONG_S
        assert trainer.broken  # the other rank waits for it
        with pytest.raises(TrainerError, match=r"abort_step: the trainer cannot go on, since trainer rank \d failed"):
            await trainer.abort_step()

    asyncio.run(story())


async def fail(trainer: RemoteTrainer, groups: list[ScoredGroup]) -> None:
    await trainer.add_groups(readable_by_one_rank(groups))
    await trainer.finish_step()


@pytest.mark.soak
def test_a_rank_that_dies_is_the_one_that_is_named(trainer: RemoteTrainer) -> None:
    """Its death breaks off the other's collective, whose error may come first."""

    async def story() -> None:
        await trainer.setup()
        await trainer.begin_step(version=1)
        os.kill(await trainer.ranks[1].pid.remote(), signal.SIGKILL)
        with pytest.raises(TrainerError, match="trainer rank 1 died during add_groups"):
            await trainer.add_groups(scored_groups(100, shortest=2))
        assert trainer.broken

    asyncio.run(story())

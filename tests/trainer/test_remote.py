"""The driver's proxy over real ranks in Ray: checkpoints, and calls that fail on one rank."""

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
from safetensors.torch import load_file

from app.checkpoint.manager import CheckpointManager
from app.checkpoint.run_state import RunState
from app.errors import TrainerError
from app.trainer.remote import RemoteTrainer
from app.types import ScoredGroup, StepReport
from tests.trainer.support import VOCABULARY, scored_groups
from tests.weight_sync.support import killed, make_trainer

TOO_LONG_S = 60.0  # an undetected failure would take the `timeout_s` of `make_trainer`: 120


@pytest.fixture
def trainer(ray_session: None, path: Path, tmp_path: Path) -> Iterator[RemoteTrainer]:
    trainer = make_trainer(path, tmp_path, ranks=2)
    with killed(*trainer.ranks):
        yield trainer


def failing_on_one_rank(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """Give the last trajectory a token outside of the vocabulary, so that the forward of one rank fails."""
    *others, last = groups
    *intact, broken = last.group.trajectories
    tokens = np.full_like(broken.completion.token_ids, VOCABULARY)
    broken = replace(broken, completion=replace(broken.completion, token_ids=tokens))
    return [*others, replace(last, group=replace(last.group, trajectories=(*intact, broken)))]


class Garbage:
    """An extension that makes a reference cycle, which only a garbage collection frees."""

    def __init__(self, rank: object) -> None:
        self.reference: weakref.ref[Garbage] | None = None

    def make(self) -> bool:
        cycle = Garbage(None)
        cycle.itself = cycle  # type: ignore[attr-defined]
        self.reference = weakref.ref(cycle)
        return gc.isenabled()

    def exists(self) -> bool:
        assert self.reference is not None
        return self.reference() is not None


def parameters_of(path: Path) -> int:
    return sum(tensor.numel() for file in path.glob("*.safetensors") for tensor in load_file(file).values())


async def step(trainer: RemoteTrainer, version: int, groups: list[ScoredGroup]) -> StepReport:
    await trainer.begin_step(version=version)
    await trainer.add_groups(groups)
    return await trainer.finish_step()


@pytest.mark.slow
async def test_two_ranks_save_restore_and_end_a_call_that_one_of_them_failed(
    trainer: RemoteTrainer, path: Path, tmp_path: Path
) -> None:
    groups = scored_groups(4, shortest=2)
    parameters = parameters_of(path)
    await trainer.setup()
    assert await trainer.checkpoint_bytes() == 12 * parameters
    await trainer.attach("garbage", Garbage)
    assert await trainer.call("garbage", Garbage.make) == [False, False]  # automatic GC is off
    assert await trainer.call("garbage", Garbage.exists) == [True, True]
    await step(trainer, 1, groups)
    assert await trainer.call("garbage", Garbage.exists) == [False, False]
    checkpoints = CheckpointManager(tmp_path, keep=2)
    saved = await checkpoints.save(trainer, RunState(1, 1))
    first = await step(trainer, 2, groups[:3])  # while the checkpoint is written
    await checkpoints.wait()
    assert checkpoints.metrics["checkpoint/bytes"] > 12 * parameters
    assert await trainer.version() == 2
    await trainer.restore(saved, version=1)
    assert await trainer.version() == 1
    again = await step(trainer, 2, groups[:3])
    for name in ("loss/policy", "grad_norm", "entropy", "lr"):
        assert again.metrics[name] == first.metrics[name], name

    await trainer.begin_step(version=3)
    with pytest.raises(TrainerError, match="step is open"):
        await trainer.restore(saved, version=1)
    assert not trainer.broken  # both ranks raised, and both still work
    started = time.monotonic()
    with pytest.raises(TrainerError, match=r"rank \d .*(add_groups|finish_step): IndexError"):
        await fail(trainer, groups)
    assert time.monotonic() - started < TOO_LONG_S
    assert trainer.broken  # the other rank is stuck in a collective
    with pytest.raises(TrainerError, match=r"rank \d"):
        await trainer.abort_step()


async def fail(trainer: RemoteTrainer, groups: list[ScoredGroup]) -> None:
    await trainer.add_groups(failing_on_one_rank(groups))
    await trainer.finish_step()


@pytest.mark.slow
async def test_a_rank_that_dies_is_the_one_that_is_named(trainer: RemoteTrainer) -> None:
    """Its death breaks the collective of the other rank, whose error may come first."""
    await trainer.setup()
    await trainer.begin_step(version=1)
    os.kill(await trainer.ranks[1].pid.remote(), signal.SIGKILL)
    with pytest.raises(TrainerError, match=r"rank 1 .*add_groups"):
        await trainer.add_groups(scored_groups(100, shortest=2))
    assert trainer.broken

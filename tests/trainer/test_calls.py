"""Calls to the ranks that fail or are late, on doubles of the actors: which of them break the trainer."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import TrainerError
from app.trainer import remote
from app.trainer.remote import RemoteTrainer


def rank(**calls: Callable[[], Awaitable[object]]) -> SimpleNamespace:
    """An actor with these calls."""

    def submit(call: Callable[[], Awaitable[object]]) -> Any:
        return SimpleNamespace(remote=lambda *_, **__: call())

    return SimpleNamespace(**{name: submit(call) for name, call in calls.items()})


async def full_disk() -> None:
    raise OSError(28, "No space left on device")


async def never() -> None:
    await asyncio.Event().wait()


async def stacks() -> str:
    return "--- rank"


async def done() -> None: ...


async def none_begun() -> int:
    return 0


def test_a_rank_that_cannot_write_breaks_no_trainer_whose_other_rank_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ROOT_CAUSE_GRACE_S", 0.1)
    trainer = RemoteTrainer([rank(write=full_disk), rank(write=never)], timeout_s=60, logs=tmp_path)
    with pytest.raises(TrainerError, match=r"rank 0 .*write: OSError"):
        asyncio.run(trainer.write(tmp_path))
    assert not trainer.broken


def test_a_write_that_is_late_breaks_no_trainer(tmp_path: Path) -> None:
    trainer = RemoteTrainer([rank(write=never, stacks=stacks)], timeout_s=0.1, logs=tmp_path)
    with pytest.raises(TrainerError, match=r"rank 0 .*write .*trainer\.timeout_s"):
        asyncio.run(trainer.write(tmp_path))
    assert not trainer.broken


def test_a_step_on_which_a_rank_is_stuck_breaks_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ROOT_CAUSE_GRACE_S", 0.1)
    ranks = [rank(finish_step=full_disk), rank(finish_step=never)]
    trainer = RemoteTrainer(ranks, timeout_s=60, logs=tmp_path)
    with pytest.raises(TrainerError, match=r"rank 0 .*finish_step: OSError"):
        asyncio.run(trainer.finish_step())
    assert trainer.broken


def test_a_step_that_cannot_be_aborted_breaks_the_trainer(tmp_path: Path) -> None:
    """Its ranks may be in the middle of a pass, with gradients that would add to those of the next step."""
    gate = {"hold_passes": none_begun, "end_passes": done}
    ranks = [rank(abort_step=full_disk, **gate), rank(abort_step=done, **gate)]
    trainer = RemoteTrainer(ranks, timeout_s=60, logs=tmp_path)
    with pytest.raises(TrainerError, match=r"rank 0 .*abort_step: OSError"):
        asyncio.run(trainer.abort_step())
    assert trainer.broken


def test_stacks_that_cannot_be_written_do_not_hide_the_rank_that_is_late(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.write_text("a file in the place of the folder")
    trainer = RemoteTrainer([rank(finish_step=never, stacks=stacks)], timeout_s=0.1, logs=logs)
    with pytest.raises(TrainerError, match=r"rank 0 .*finish_step within"):
        asyncio.run(trainer.finish_step())
    assert trainer.broken

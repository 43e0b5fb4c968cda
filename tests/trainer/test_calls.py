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


async def done() -> int:
    return 0


Calls = dict[str, Callable[[], Awaitable[object]]]
GATE: Calls = {"hold_passes": done, "end_passes": done}
ONE_ABORTS: list[Calls] = [{"abort_step": full_disk, **GATE}, {"abort_step": done, **GATE}]


@pytest.mark.parametrize(
    ("method", "ranks", "timeout_s", "named", "broken"),
    [
        ("write", [{"write": full_disk}, {"write": never}], 60, "write: OSError", False),  # rank 1 still writes
        ("write", [{"write": never, "stacks": stacks}], 0.1, r"write .*trainer\.timeout_s", False),
        ("finish_step", [{"finish_step": full_disk}, {"finish_step": never}], 60, "finish_step: OSError", True),
        # Ranks may be in the middle of a pass, with gradients that would add to those of the next step.
        ("abort_step", ONE_ABORTS, 60, "abort_step: OSError", True),
        ("finish_step", [{"finish_step": never, "stacks": stacks}], 0.1, "finish_step within", True),
    ],
    ids=["a write fails", "a write is late", "a step fails on one rank", "an abort fails", "a step is late"],
)
def test_a_call_that_fails_names_its_rank_and_breaks_the_trainer_unless_ranks_only_write(
    method: str,
    ranks: list[Calls],
    timeout_s: float,
    named: str,
    broken: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stacks that cannot be written, as there is a file in the place of their folder, hide no rank."""
    monkeypatch.setattr(remote, "ROOT_CAUSE_GRACE_S", 0.1)
    (tmp_path / "logs").touch()
    trainer = RemoteTrainer([rank(**calls) for calls in ranks], timeout_s=timeout_s, logs=tmp_path / "logs")
    with pytest.raises(TrainerError, match=f"rank 0 .*{named}"):
        asyncio.run(getattr(trainer, method)(*([tmp_path] if method == "write" else [])))
    assert (trainer.broken is not None) == broken

"""A step that another thread ends between two microbatches, on one rank and on two."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from app.config.algorithm import AlgorithmConfig
from app.errors import TrainerError
from app.trainer import step as step_module
from app.trainer.step import PassGate, TrainStep
from app.types import ScoredGroup
from tests.trainer.ranks import run_on
from tests.trainer.support import Scenario, make_step, parameters, scored_groups, train


def scenario(groups: Sequence[ScoredGroup], **changes: Any) -> Scenario:
    """Passes of few tokens: many of them."""
    return Scenario(AlgorithmConfig(prompts_per_step=len(groups), group_size=4, **changes), groups, budget=24)


def end_after(step: TrainStep, passes: int) -> list[bool]:
    """Hold the step in its pass of this number and end it there. Returns, of each pass, whether it is an update."""
    begun: list[bool] = []
    enter = step.gate.enter

    def entered(*, update: bool = False) -> None:
        if len(begun) == passes:
            step.gate.stop_after(step.gate.hold())
        enter(update=update)
        begun.append(update)

    step.gate.enter = entered  # type: ignore[method-assign]
    return begun


@pytest.mark.parametrize("passes", [0, 3, -1], ids=["at once", "after three", "before the update"])
def test_a_step_ends_before_its_next_microbatch_or_update_and_changes_nothing(passes: int, path: Path) -> None:
    groups = scored_groups(4, shortest=3)
    if passes < 0:
        counted = make_step(path, scenario(groups))
        everything = end_after(counted, 10_000)
        train(counted, scenario(groups))
        passes += len(everything)

    step = make_step(path, scenario(groups))
    before = parameters(step.model)
    begun = end_after(step, passes)
    with pytest.raises(TrainerError, match=f"{passes} passes"):
        train(step, scenario(groups))
    assert len(begun) == passes
    step.abort()
    assert step.version == 0
    assert all(torch.equal(before[name], after) for name, after in parameters(step.model).items())

    del step.gate.enter
    alone = make_step(path, scenario(groups))
    assert train(step, scenario(groups)).metrics["grad_norm"] == train(alone, scenario(groups)).metrics["grad_norm"]
    assert step.gate.hold() == 0  # the passes of a closed step are forgotten


def test_a_step_whose_first_update_has_begun_is_finished(path: Path) -> None:
    groups = scored_groups(4, shortest=3)
    two = scenario(groups, updates_per_step=2)
    counted = make_step(path, two)
    begun = end_after(counted, 10_000)
    alone = train(counted, two)
    assert sum(begun) == 2

    step = make_step(path, two)
    end_after(step, begun.index(True) + 1)
    assert train(step, two).metrics["grad_norm"] == alone.metrics["grad_norm"]
    assert step.version == 1


def test_a_held_rank_without_a_second_call_ends_with_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "HOLD_TIMEOUT_S", 0.05)
    gate = PassGate()
    gate.hold()
    with pytest.raises(TrainerError, match="within 0 s"):
        gate.enter()


def interrupted_at_two_moments(mesh: DeviceMesh, path: Path, groups: Sequence[ScoredGroup]) -> list[Any]:
    """End steps on two ranks, of which one is held first, by turns; then make a whole step. Rank 0 returns all results.

    Threads play the driver: they exchange how many passes have begun in a process group of their own.
    """
    rank = dist.get_rank()
    driver = dist.new_group(backend="gloo")
    step = make_step(path, scenario(groups), mesh)
    ended = []
    for attempt in range(6):
        step.begin(1)
        first = attempt % 2 == rank

        def end(first: bool = first, attempt: int = attempt) -> None:
            time.sleep(0.01 * attempt + (0.0 if first else 0.3))
            begun = torch.tensor([step.gate.hold()])
            dist.all_reduce(begun, op=dist.ReduceOp.MAX, group=driver)
            step.gate.stop_after(int(begun))

        driving = threading.Thread(target=end)
        driving.start()
        try:
            while True:
                step.add_groups(groups)
        except TrainerError as error:
            ended.append(str(error))
        driving.join()
        step.abort()

    report = train(step, scenario(groups))
    results: list[Any] = [None, None]
    dist.all_gather_object(results, (ended, step.version, report.metrics["grad_norm"]))
    return results


def test_two_ranks_end_after_the_same_microbatch_whichever_is_held_first(path: Path, tmp_path: Path) -> None:
    groups = scored_groups(8, shortest=3)
    (ended, version, norm), other = run_on(2, interrupted_at_two_moments, tmp_path / "out", path, groups)
    assert other == (ended, version, norm)
    assert len(ended) == 6
    assert version == 1
    alone = train(make_step(path, scenario(groups)), scenario(groups))
    assert norm == pytest.approx(alone.metrics["grad_norm"], rel=1e-4)

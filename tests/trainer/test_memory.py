"""Tensors that a step leaves alive, without automatic garbage collection."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.trainer.step import COLLECT_PASSES
from tests.trainer.support import Scenario, make_step, scored_groups
from tests.trainer.test_step import GRPO

PASSES = 50


@pytest.fixture
def no_automatic_gc() -> Iterator[None]:
    """As in a trainer rank. Objects of before are not counted."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def test_tensors_in_reference_cycles_are_collected_every_few_passes(
    no_automatic_gc: None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of `PASSES` microbatches leaves a tensor in a cycle, and otherwise its sums alone."""
    step = make_step(path, Scenario(GRPO, [], budget=1))
    computed = step._forward_backward
    live = []

    def counted(micro: Any) -> Any:
        cycle: list[Any] = [torch.zeros(1)]
        cycle.append(cycle)
        result = computed(micro)
        live.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
        return result

    monkeypatch.setattr(step, "_forward_backward", counted)
    step.begin(1)
    step.add_groups(scored_groups(PASSES, size=1, shortest=1))
    step.finish()
    assert len(live) == PASSES

    # One tensor of sums each; a layout has a few, and the number of a pass depends on its lengths.
    assert live[-1] - live[1] <= PASSES + 5 + COLLECT_PASSES

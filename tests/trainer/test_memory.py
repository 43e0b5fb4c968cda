"""Tensors that a step leaves alive: none in reference cycles, and cycles of others are collected between passes."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.trainer import step as step_module
from tests.model.support import save_qwen3
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


def live_tensors() -> int:
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def live_after_each_pass(path: Path, monkeypatch: pytest.MonkeyPatch, *, cycles: bool) -> list[int]:
    """Live tensors after each of `PASSES` microbatches, each of which may leave one in a reference cycle."""
    step = make_step(path, Scenario(GRPO, [], budget=1))
    live = []
    computed = step._forward_backward

    def counted(micro: Any) -> Any:
        if cycles:
            cycle: list[Any] = [torch.zeros(1)]
            cycle.append(cycle)
        result = computed(micro)
        live.append(live_tensors())
        return result

    monkeypatch.setattr(step, "_forward_backward", counted)
    step.begin(1)
    step.add_groups(scored_groups(PASSES, size=1, shortest=1))
    step.finish()
    assert len(live) == PASSES
    return live


def test_fifty_microbatches_leave_only_their_sums(
    no_automatic_gc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "COLLECT_PASSES", PASSES + 1)
    live = live_after_each_pass(save_qwen3(tmp_path / "model"), monkeypatch, cycles=False)
    # One tensor of sums each; a layout has a few, and the number of a pass depends on its lengths.
    assert live[-1] - live[1] <= PASSES + 5


def test_tensors_in_reference_cycles_are_collected_every_few_passes(
    no_automatic_gc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = live_after_each_pass(save_qwen3(tmp_path / "model"), monkeypatch, cycles=True)
    assert live[-1] - live[1] <= PASSES + 5 + step_module.COLLECT_PASSES

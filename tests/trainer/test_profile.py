"""A profile has the step and its weight sync, in one trace per rank."""

import json
from pathlib import Path

import torch

from app.trainer.throughput import StepProfiler


def traced(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def test_a_trace_ends_with_the_weight_sync(tmp_path: Path) -> None:
    profiler = StepProfiler([2], tmp_path / "profile", 0)
    for step in (1, 2, 3):
        profiler.begin(step)
        torch.ones(4).sin()
        torch.ones(4).cos()  # of the sync
        profiler.finish()
        profiler.finish()  # idempotent: adapters release twice
    (trace,) = tmp_path.glob("profile/*")
    assert trace.name == "step_2_rank_0.json"
    assert {"aten::sin", "aten::cos"} <= traced(trace)


def test_a_step_without_a_sync_is_written_when_the_next_begins(tmp_path: Path) -> None:
    profiler = StepProfiler([1], tmp_path, 3)
    profiler.begin(1)
    torch.ones(4).sin()
    profiler.begin(2)
    assert "aten::sin" in traced(tmp_path / "step_1_rank_3.json")


def test_an_aborted_step_leaves_no_trace(tmp_path: Path) -> None:
    profiler = StepProfiler([1], tmp_path, 0)
    profiler.begin(1)
    profiler.abort()
    profiler.finish()
    assert not list(tmp_path.iterdir())

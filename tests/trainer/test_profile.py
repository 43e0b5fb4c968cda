"""A profile has the step and its weight sync, in one trace per rank."""

import json
from pathlib import Path

import torch

from app.trainer.throughput import StepProfiler


def traced(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def test_a_step_is_traced_to_the_end_of_its_sync_or_to_the_next_step_unless_it_is_aborted(tmp_path: Path) -> None:
    profiler = StepProfiler([2, 3, 4], tmp_path / "profile", 0)
    for step in (1, 2):
        profiler.begin(step)
        torch.ones(4).sin()
        torch.ones(4).cos()  # of the sync
        profiler.finish()
        profiler.finish()  # idempotent: adapters release twice
    profiler.begin(3)
    torch.ones(4).sin()
    profiler.begin(4)
    profiler.abort()
    profiler.finish()

    synced, alone = sorted(tmp_path.glob("profile/*"))
    assert (synced.name, alone.name) == ("step_2_rank_0.json", "step_3_rank_0.json")
    assert {"aten::sin", "aten::cos"} <= traced(synced)
    assert "aten::sin" in traced(alone)

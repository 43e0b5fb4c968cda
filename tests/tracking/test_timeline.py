import json
from pathlib import Path
from typing import Any

import pytest

from app.tracking.run_folder.timeline import Timeline


def trace(timeline: Timeline, folder: Path) -> dict[str, Any]:
    timeline.write(folder)
    return json.loads((folder / "timeline.json").read_text())


def rows(content: dict[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """Return row name → its spans (name, start and end in microseconds)."""
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    spans_by_row: dict[str, list[tuple[str, float, float]]] = {}
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            span = (event["name"], event["ts"], event["ts"] + event["dur"])
            spans_by_row.setdefault(names[event["tid"]], []).append(span)
    return spans_by_row


def test_nested_spans_share_a_row_and_overlapping_ones_get_their_own(tmp_path: Path) -> None:
    timeline = Timeline()
    base = timeline.now()
    for name, start, end in [("a", 0, 10), ("inside a", 2, 4), ("b", 5, 12), ("c", 12, 13), ("inside b", 11, 12)]:
        timeline.add("engine 0", name, base + start, base + end)
    timeline.add("trainer", "train", base + 1, base + 2)
    spans_by_row = rows(trace(timeline, tmp_path))
    assert {row: [name for name, _, _ in spans] for row, spans in spans_by_row.items()} == {
        "engine 0": ["a", "inside a", "inside b", "c"],
        "engine 0 ·2": ["b"],
        "trainer": ["train"],
    }


def test_the_newest_spans_are_kept_and_older_ones_counted(tmp_path: Path) -> None:
    timeline = Timeline(capacity=10)
    for index in range(25):
        timeline.add("driver", str(index), timeline.now(), timeline.now())
    content = trace(timeline, tmp_path)
    assert [event["name"] for event in content["traceEvents"] if event["ph"] == "X"] == [str(i) for i in range(15, 25)]
    assert content["otherData"]["older_spans_left_out"] == 15


def test_a_resumed_run_keeps_the_spans_of_the_earlier_attempt(tmp_path: Path) -> None:
    first = Timeline()
    first.add("driver", "before", first.now() - 100, first.now() - 50)
    first.write(tmp_path)
    second = Timeline()
    second.load(tmp_path)
    second.add("driver", "after", second.now(), second.now() + 1)
    spans = rows(trace(second, tmp_path))["driver"]
    assert [name for name, _, _ in spans] == ["before", "after"]
    assert spans[1][1] - spans[0][1] == pytest.approx(100e6, abs=5e6)

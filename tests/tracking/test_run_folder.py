"""The files of a run's folder: metrics, summary, samples and timeline."""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config import RunConfig
from app.tracking.recorder import RunFolderRecorder
from app.tracking.run_folder import metrics_file, samples, summary
from app.tracking.run_folder.summary import Summary
from app.tracking.run_folder.timeline import Timeline
from tests.folders import json_lines, warnings
from tests.tracking.records import episode_group, group, metrics


def test_each_step_is_one_line_that_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(metrics_file.MetricsFile(path)) as file:
        file.append(1, {"loss/policy": 0.5})
        assert json_lines(path) == [{"step": 1, "loss/policy": 0.5}]
        file.append(1, {"eval/accuracy": 0.75})
        file.append(2, {"loss/policy": math.nan, "lr": math.inf})
        with pytest.raises(ValueError, match="step 1 comes after step 2"):
            file.append(1, {})
    first, second = json_lines(path)
    assert first == {"step": 1, "loss/policy": 0.5, "eval/accuracy": 0.75}
    assert second == {"step": 2, "loss/policy": None, "lr": None}


def test_an_incomplete_line_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "lr": 1.0}\n{"step": 2, "l')
    assert [row["step"] for row in metrics_file.read(path)] == [1]
    with closing(metrics_file.MetricsFile(path)) as file:
        assert file.last_step == 1
        file.append(2, {"lr": 2.0})
    assert json_lines(path) == [{"step": 1, "lr": 1.0}, {"step": 2, "lr": 2.0}]


def test_the_lines_after_a_step_are_moved_to_another_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(metrics_file.MetricsFile(path)) as file:
        for step in range(5):
            file.append(step, {"lr": step})
    with path.open("a") as lines:
        lines.write('{"step": 5, "l')  # of a killed writer
    metrics_file.move_after(path, 2, tmp_path / "aside_1" / "metrics.jsonl")
    assert json_lines(path) == [{"step": step, "lr": step} for step in (0, 1, 2)]
    assert json_lines(tmp_path / "aside_1" / "metrics.jsonl") == [{"step": step, "lr": step} for step in (3, 4)]


def test_summary_follows_the_steps(tmp_path: Path) -> None:
    run = Summary(tmp_path)
    run.add(0, {"eval/accuracy": 0.3})
    for step in (1, 2, 3):
        run.add(step, metrics(step))
    for step, accuracy in ((2, 0.9), (3, 0.8)):
        run.add(step, {"eval/accuracy": accuracy})
    run.write()
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content.pop("total/seconds") >= 0
    assert content == {
        "status": "running",
        "attempts": 1,
        "steps": 3,
        "eval/evaluations": 3,
        "eval/accuracy_first": 0.3,
        "eval/accuracy_last": 0.8,
        "eval/accuracy_best": 0.9,
        "eval/accuracy_best_step": 2,
        "total/completion_tokens": 300,
        "total/step_seconds": 3.0,
        "total/generate_seconds": 0.6 * 3,
        "total/train_seconds": 0.3 + 0.3 + 0.3,
        "total/sync_seconds": 0.05 + 0.05 + 0.05,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("content", ['{"status": "fini', "[]"], ids=["cut", "another type"])
def test_a_summary_that_cannot_be_read_counts_as_empty_and_is_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(content)
    assert summary.read(tmp_path) == {}
    assert not summary.is_finished(tmp_path)
    Summary(tmp_path).write()
    assert summary.read(tmp_path)["status"] == "running"


def test_samples_are_spread_evenly_over_prompts_before_any_gives_a_second() -> None:
    groups = [group(row, [0.0, 1.0]) for row in range(8)]
    chosen = samples.choose(groups, 4)
    assert [(one.prompt.answer, one.text) for one in chosen] == [(str(row), "text 0") for row in (0, 2, 4, 6)]
    assert [one.text for one in samples.choose(groups[:2], 3)] == ["text 0", "text 0", "text 1"]
    assert len(samples.choose(groups, 100)) == 16
    assert samples.choose(groups, 0) == []


def test_a_line_has_tokens_and_rewards_and_of_an_episode_every_turn_and_sequence(tmp_path: Path) -> None:
    groups = [group(7, [0.5, float("nan")], version=2), episode_group()]
    path = samples.write_samples(tmp_path, 3, groups, 4, lambda ids: f"q{ids}")
    assert path == tmp_path / "samples/step_3.jsonl"
    assert path is not None
    first, episode, failed, _ = json_lines(path)
    assert (first["prompt"], first["prompt_text"], first["answer"]) == ("arithmetic/7@0", "q[7, 1, 2]", "7")
    assert (first["completion"], first["reward"], first["reward_components"]) == ("text 0", 0.5, {"exact": 0.5})
    assert (first["tokens"], first["logprobs"], first["versions"]) == ([0], [-0.25], [[2, 0, 1]])
    assert (failed["reward"], failed["logprobs"]) == (None, [-0.25, -0.25])

    assert (episode["completion"], episode["ending"], episode["scores"]) == (
        "42",
        "stop",
        {"found": 1.0, "polite": None},
    )
    assert episode["turns"][1] == {"role": "assistant", "text": "<b>41</b>", "tokens": 2, "seconds": 1.25}
    (sequence,) = episode["sequences"]
    assert json.loads(samples.line({"gaps": np.arange(5, dtype=np.int32)[::2]})) == {"gaps": [0, 2, 4]}
    assert (sequence["tokens"], sequence["sampled"]) == ([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 0, 1])
    assert (sequence["logprobs"], sequence["versions"]) == ([-0.5, -0.25, -0.75], [[3, 0, 3]])


def test_a_sample_or_a_timeline_that_cannot_be_written_costs_a_warning_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tokens: Sequence[int]) -> str:
        raise KeyError("a token that nobody knows")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with RunFolderRecorder(RunConfig(steps=2), tmp_path) as recorder:
        monkeypatch.setattr(recorder.timeline, "write_if_due", full)
        for step in (1, 2):
            recorder.log_samples(step, [group(0, [0.0, 1.0])], broken)
            recorder.log(step, metrics(step))
        recorder.log_eval(2, {"eval": {"accuracy": 0.75}}, [group(0, [0.0, 1.0])], broken)
        monkeypatch.undo()
    rows = json_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["eval/accuracy"] == 0.75
    assert [text.split()[0] for text in warnings(tmp_path)] == ["samples", "timeline.json"]


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

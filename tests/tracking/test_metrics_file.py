import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.tracking.run_folder import metrics_file


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_one_line_that_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(metrics_file.MetricsFile(path)) as file:
        file.append(1, {"loss/policy": 0.5})
        assert rows(path) == [{"step": 1, "loss/policy": 0.5}]
        file.append(2, {"loss/policy": math.nan, "lr": math.inf})
    assert rows(path) == [{"step": 1, "loss/policy": 0.5}, {"step": 2, "loss/policy": None, "lr": None}]


def test_metrics_of_the_same_step_join_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(metrics_file.MetricsFile(path)) as file:
        file.append(1, {"lr": 1.0})
        file.append(1, {"eval/accuracy": 0.75})
        file.append(2, {"lr": 2.0})
    assert rows(path) == [{"step": 1, "lr": 1.0, "eval/accuracy": 0.75}, {"step": 2, "lr": 2.0}]


def test_an_earlier_step_is_refused(tmp_path: Path) -> None:
    with closing(metrics_file.MetricsFile(tmp_path / "metrics.jsonl")) as file:
        file.append(2, {})
        with pytest.raises(ValueError, match="step 1 comes after step 2"):
            file.append(1, {})


def test_an_incomplete_line_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "lr": 1.0}\n{"step": 2, "l')
    assert [row["step"] for row in metrics_file.read(path)] == [1]
    with closing(metrics_file.MetricsFile(path)) as file:
        assert file.last_step == 1
        file.append(2, {"lr": 2.0})
    assert rows(path) == [{"step": 1, "lr": 1.0}, {"step": 2, "lr": 2.0}]


def test_the_lines_after_a_step_are_moved_to_another_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(metrics_file.MetricsFile(path)) as file:
        for step in range(5):
            file.append(step, {"lr": step})
    with path.open("a") as lines:
        lines.write('{"step": 5, "l')  # of a killed writer
    metrics_file.move_after(path, 2, tmp_path / "aside_1" / "metrics.jsonl")
    assert rows(path) == [{"step": step, "lr": step} for step in (0, 1, 2)]
    assert rows(tmp_path / "aside_1" / "metrics.jsonl") == [{"step": step, "lr": step} for step in (3, 4)]


def test_where_no_line_is_later_nothing_is_set_aside_and_half_a_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    for each in (path, tmp_path / "absent.jsonl"):
        metrics_file.move_after(each, 2, tmp_path / "aside_1" / "prompts.jsonl")
    assert path.read_text() == '{"step": 1}\n'
    assert [each.name for each in tmp_path.iterdir()] == ["prompts.jsonl"]

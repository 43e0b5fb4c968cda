import math
from contextlib import closing
from pathlib import Path

import pytest

from app.tracking.run_folder import metrics_file
from tests.folders import json_lines


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

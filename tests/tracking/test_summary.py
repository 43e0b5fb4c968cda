import json
from pathlib import Path

import pytest

from app.tracking.run_folder import summary
from app.tracking.run_folder.summary import Summary
from tests.tracking.records import metrics


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

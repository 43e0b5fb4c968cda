"""The table at a sweep's end."""

import json
from pathlib import Path

from app.tracking.report.sweep import table


def test_the_best_run_comes_first_and_failed_runs_show_their_error(tmp_path: Path) -> None:
    runs = {
        "0-grpo": {"status": "finished", "steps": 60, "eval/accuracy_first": 0.285, "eval/accuracy_last": 0.9}
        | {"eval/accuracy_best": 0.91, "total/seconds": 72.0},
        "1-dapo": {"status": "finished", "steps": 60, "eval/accuracy_first": 0.285, "eval/accuracy_last": 0.98}
        | {"eval/accuracy_best": 0.98, "total/seconds": 133.0},
        "2-broken": {"status": "failed", "steps": 3, "total/seconds": 20.0, "error": "RunError: no way\nmore"},
    }
    for name, values in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(values))
    (tmp_path / "3-refused").mkdir()
    (tmp_path / ".submitit").mkdir()
    lines = table(tmp_path).splitlines()
    assert lines[0] == str(tmp_path)
    assert [line.split()[0] for line in lines[1:6]] == ["run", "1-dapo", "0-grpo", "2-broken", "3-refused"]
    assert lines[2].split() == ["1-dapo", "finished", "60", "28.5%", "→", "98.0%", "98.0%", "2", "min", "13", "s"]
    assert lines[5].split() == ["3-refused", "not", "started"]
    assert lines[6:] == ["2-broken: RunError: no way"]

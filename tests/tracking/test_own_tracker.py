"""A tracker of the user's own, named by its path in `tracking.use`."""

import sys
from pathlib import Path

import pytest

from app.tracking.recorder import RunFolderRecorder
from tests.folders import json_lines
from tests.tracking.records import group, metrics, offline

FULL = """
import json

class Tracker:
    def __init__(self, run, url="none"):
        run.folder.mkdir(parents=True)
        self.lines = (run.folder / "lines.jsonl").open("w")
        self.write("open", url, run.project, run.run_name, run.config["steps"])
    def write(self, *line):
        print(json.dumps(line), file=self.lines, flush=True)
    def log(self, step, metrics):
        self.write("log", step, metrics)
    def alert(self, step, title, text):
        self.write("alert", step, title)
    def samples(self, step, kind, rows):
        self.write("samples", step, kind, [(row["completion"], row["reward"]) for row in rows])
    def close(self, status):
        self.write("close", status)
"""


def test_a_tracker_of_the_working_directory_gets_the_run_and_everything_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"tracker_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(FULL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = offline(f"{module}.Tracker")
    config.tracking.args = {"url": "http://x"}
    run = tmp_path / "runs" / "mine"
    with RunFolderRecorder(config, run) as recorder:
        recorder.log_eval(0, {"eval": {"accuracy": 0.25}}, [group(0, [1.0])])
        recorder.log(1, {**metrics(1), "lr": 0.5, "loss/policy": float("nan")})
        recorder.log(2, {**metrics(2), "reward/failed_fraction": 0.5})

    lines = json_lines(run / "tracking" / f"{module}.Tracker" / "lines.jsonl")
    assert lines[0] == ["open", "http://x", "hydra-posttrain", "runs/mine", 3]
    assert lines[1] == ["samples", 0, "eval", [["text 0", 1.0]]]
    assert lines[2] == ["log", 0, {"eval/accuracy": 0.25}]
    assert lines[3][:2] == ["log", 1]
    assert lines[3][2]["train/lr"] == 0.5
    assert "loss/policy" not in lines[3][2]
    assert lines[-1] == ["close", "finished"]
    alerts = [line for line in lines if line[0] == "alert"]
    assert len(alerts) == 1

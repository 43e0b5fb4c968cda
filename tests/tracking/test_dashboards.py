"""Dashboards: TensorBoard, ClearML, Prometheus, a tracker of the user's own, a slow one. W&B has test_wandb.py."""

import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.tracking import dashboards
from app.tracking.dashboards import DashboardOptions, DashboardWorker, close_all
from app.tracking.recorder import RunFolderRecorder
from tests.folders import json_lines, warnings
from tests.tracking.records import group, metrics, offline, record
from tests.waiting import until


def test_tensorboard_reads_back_the_curve_of_a_resumed_run_without_duplicates(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(offline("tensorboard"), tmp_path, (1, 2, 3))
    record(offline("tensorboard"), tmp_path, (3, 4), resumed_at=2)
    events = EventAccumulator(str(tmp_path / "tracking/tensorboard"))
    events.Reload()
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("reward/mean")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
    ]
    assert [event.value for event in events.Scalars("train/lr")] == [0.5] * 4
    assert [(event.step, event.value) for event in events.Scalars("eval/accuracy")] == [(0, 0.25)]
    assert "group_size" in events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    assert warnings(tmp_path) == []


def test_clearml_keeps_scalars_and_hyperparameters_and_gets_the_steps_after_a_resume_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its server keeps one value per metric and step, so later ones replace those of the earlier attempt."""
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    record(offline("clearml"), tmp_path / "run", (1, 2, 3))
    record(offline("clearml"), tmp_path / "run", (3, 4), resumed_at=2)
    assert "session stored in" not in capfd.readouterr().out
    assert list((tmp_path / "cache").rglob("offline-*")) == []
    assert warnings(tmp_path / "run") == []
    files = (tmp_path / "run/tracking/clearml").glob("offline-*.zip")
    first, second = sorted(map(clearml_session, files), key=lambda session: session[0])
    assert first[0] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert second[0] == [(3, 0.3), (4, 0.4)]
    assert first[1]["hyperparams"]["algorithm"]["group_size"]["value"] == "8"
    assert first[1]["hyperparams"]["run"]["steps"]["value"] == "3"


def clearml_session(path: Path) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the rewards, as (step, value), and the task of an offline session."""
    with zipfile.ZipFile(path) as session:
        scalars = [
            event
            for line in session.read("metrics.jsonl").decode().splitlines()
            for event in json.loads(line)
            if event["type"] == "training_stats_scalar"
        ]
        task = json.loads(session.read("task.json"))
    rewards = [(e["iter"], round(e["value"], 6)) for e in scalars if (e["metric"], e["variant"]) == ("reward", "mean")]
    return rewards, task


class Slow:
    """A dashboard that blocks until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.received: list[Any] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.go.wait(20)
        if step == 3:
            raise ConnectionError("gone for a moment")
        self.received.append(step)

    def close(self, status: str) -> None:
        self.received.append(status)


def test_a_slow_dashboard_drops_and_counts_what_its_queue_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, warned = Slow(), list[str]()
    monkeypatch.setattr(dashboards, "open_dashboard", lambda name, options: slow)
    metrics = tmp_path / "metrics.jsonl"
    options = DashboardOptions({}, tmp_path / "slow", metrics, "project", "run", True, None, warned.append)
    worker = DashboardWorker("slow", options, capacity=4)
    start = time.monotonic()
    for step in range(100):
        worker.log(step, {"lr": 1.0})
        time.sleep(0.001)
    assert time.monotonic() - start < 5
    slow.go.set()
    close_all([worker], "finished", 10)
    assert worker.dropped >= 94
    assert slow.received[-1] == "finished"
    assert f" {worker.dropped} messages" in warned[-1]


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


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels == {"run": "model/run 1"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_every_metric_is_a_gauge_of_the_run_until_the_run_ends(tmp_path: Path) -> None:
    warned = list[str]()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config, metrics = {"tracking": {"port": port}}, tmp_path / "metrics.jsonl"
    options = DashboardOptions(config, tmp_path, metrics, "p", "model/run 1", False, None, warned.append)
    worker = DashboardWorker("prometheus", options)
    worker.log(3, {"lr": 0.5, "reward/mean": 0.25, "time/step": 2.0, "reward/pass@4": 1.0, "loss": float("nan")})
    worker.log(4, {"reward/mean": 0.75})
    worker.alert(4, "stalled", "no tokens")
    expected = {
        "posttrain_step": 4.0,
        "posttrain_train_lr": 0.5,
        "posttrain_reward_mean": 0.75,
        "posttrain_time_step_seconds": 2.0,
        "posttrain_reward_pass_4": 1.0,
        "posttrain_alarms_stalled": 1.0,
    }

    def served() -> bool:
        try:
            return scraped(port) == expected
        except urllib.error.URLError:
            return False

    until(served, 30)
    close_all([worker], "finished", 30.0)
    assert warned == []
    with pytest.raises(urllib.error.URLError):
        scraped(port)

import json
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.tracking import dashboards
from app.tracking.dashboards import DashboardOptions, DashboardWorker, close_all
from tests.folders import warnings
from tests.tracking.records import offline, record


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

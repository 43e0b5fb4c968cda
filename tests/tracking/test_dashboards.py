import json
import os
import pty
import subprocess
import sys
import threading
import time
import zipfile

import pytest

from app.config import RunConfig
from app.tracking import dashboards
from app.tracking.dashboard import DashboardOptions, Progress
from app.tracking.dashboards import DashboardWorker, grouped
from app.tracking.recorder import RunFolderRecorder
from app.tracking.run_folder.summary import Status

BLOCK, HEADER = 32768, 7


def make_config(*use, steps=3):
    config = RunConfig(steps=steps)
    config.tracking.use = list(use)
    config.tracking.offline = True
    return config


def record(config, folder, metrics, steps, resumed_at=None):
    with RunFolderRecorder(config, folder) as recorder:
        if resumed_at is not None:
            recorder.resume(resumed_at)
        else:
            recorder.log_eval(0, {"eval": {"accuracy": 0.25}})
        for step in steps:
            recorder.log(step, {**metrics(step), "lr": 0.5})


def warnings(folder):
    path = folder / "logs/warnings.jsonl"
    return [json.loads(line)["text"] for line in path.read_text().splitlines()] if path.exists() else []


def test_names_without_a_prefix_are_grouped_and_non_finite_values_are_left_out():
    assert grouped({"lr": 1, "reward/mean": 0.5, "loss/policy": float("nan"), "x": None}) == {
        "train/lr": 1.0,
        "reward/mean": 0.5,
    }


def test_tensorboard_reads_back_the_curve_of_a_resumed_run_without_duplicates(tmp_path, metrics):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(make_config("tensorboard"), tmp_path, metrics, (1, 2, 3))
    record(make_config("tensorboard"), tmp_path, metrics, (3, 4), resumed_at=2)
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


def test_wandb_offline_keeps_history_config_and_run_id_across_a_resume(tmp_path, metrics):
    record(make_config("wandb"), tmp_path, metrics, (1, 2, 3))
    record(make_config("wandb"), tmp_path, metrics, (3, 4), resumed_at=2)
    assert warnings(tmp_path) == [
        "wandb cannot replace steps 3 to 3, which an earlier attempt sent: its chart keeps them. metrics.jsonl and "
        "report.html have those of this attempt."
    ]
    run_id = json.loads((tmp_path / "tracking/wandb.json").read_text())["run_id"]
    history, config = {}, {}
    files = sorted((tmp_path / "tracking/wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert files
    for file in files:
        for entry in wandb_records(file):
            if entry.WhichOneof("record_type") == "history":
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in entry.history.item}
                assert values["_step"] not in history, "a step was sent twice"
                history[values["_step"]] = values
            elif entry.WhichOneof("record_type") == "run":
                config.update({item.key: json.loads(item.value_json) for item in entry.run.config.update})
    assert {step: round(values["reward/mean"], 6) for step, values in history.items() if step} == {
        1: 0.1,
        2: 0.2,
        3: 0.3,
        4: 0.4,
    }
    assert (history[0]["eval/accuracy"], history[1]["train/lr"]) == (0.25, 0.5)
    assert config["algorithm"]["group_size"] == 8


def wandb_records(path):
    """Yield the records of a `.wandb` file: LevelDB's log format (32 KiB blocks; checksum, length and type)."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    offset = HEADER
    content = b""
    while offset + HEADER <= len(data):
        if BLOCK - offset % BLOCK < HEADER:
            offset += BLOCK - offset % BLOCK
            continue

        length = int.from_bytes(data[offset + 4 : offset + 6], "little")
        kind = data[offset + 6]
        content += data[offset + HEADER : offset + HEADER + length]
        offset += HEADER + length
        if kind in (1, 4):  # a full record, or the last fragment of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            content = b""
            yield record


def test_wandb_without_a_key_records_offline_and_never_prompts_even_on_a_terminal(tmp_path):
    script = (
        "import sys; from pathlib import Path; from app.tracking.dashboard import DashboardOptions\n"
        "from app.tracking.wandb import WeightsAndBiases\n"
        "folder = Path(sys.argv[1]) / 'tracking/wandb'\n"
        "options = DashboardOptions({}, folder, 'project', 'run', False, None, lambda text: print('warned:', text))\n"
        "assert sys.stdin.isatty() and sys.stderr.isatty()\n"
        "WeightsAndBiases(options).close('finished')\n"
    )
    keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "NETRC")
    environment = {name: value for name, value in os.environ.items() if name not in keys} | {"HOME": str(tmp_path)}
    controller, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=environment,
        text=True,
        timeout=60,
        check=True,
    )
    os.close(controller)
    os.close(terminal)
    warned = [line for line in done.stdout.splitlines() if line.startswith("warned:")]
    assert len(warned) == 1
    assert warned[0].startswith("warned: wandb records this run offline: ")
    assert "wandb sync" in warned[0]
    assert list((tmp_path / "tracking/wandb").glob("offline-run-*/*.wandb"))


def test_clearml_offline_keeps_scalars_and_hyperparameters(tmp_path, metrics, monkeypatch):
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    record(make_config("clearml"), tmp_path / "run", metrics, (1, 2, 3))
    assert warnings(tmp_path / "run") == []
    rewards, task = clearml_session(next((tmp_path / "run/tracking/clearml").glob("offline-*.zip")))
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert task["hyperparams"]["algorithm"]["group_size"]["value"] == "8"
    assert task["hyperparams"]["run"]["steps"]["value"] == "3"


def test_clearml_gets_the_steps_after_a_resume_again(tmp_path, metrics, monkeypatch):
    """Its server keeps one value per metric and step, so they replace those of the earlier attempt."""
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    record(make_config("clearml"), tmp_path / "run", metrics, (1, 2, 3))
    record(make_config("clearml"), tmp_path / "run", metrics, (3, 4), resumed_at=2)
    sessions = (tmp_path / "run/tracking/clearml").glob("offline-*.zip")
    assert sorted(clearml_session(each)[0] for each in sessions) == [
        [(1, 0.1), (2, 0.2), (3, 0.3)],
        [(3, 0.3), (4, 0.4)],
    ]


def clearml_session(path):
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


@pytest.mark.parametrize("use", ["tensorboard", "wandb"])
def test_a_folder_that_cannot_be_written_costs_one_warning_and_nothing_else(tmp_path, metrics, use):
    (tmp_path / "tracking").write_text("a file where the folder should be")
    record(make_config(use), tmp_path, metrics, (1, 2, 3))
    messages = warnings(tmp_path)
    assert len(messages) == 1
    assert messages[0].startswith(f"{use} could not be opened; the run continues without it: ")
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_refused_network_and_a_wrong_key_cost_a_warning_and_no_time_of_a_step(tmp_path, metrics, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("app.tracking.recorder.DASHBOARD_DEADLINE_S", dict.fromkeys(Status, 1.0))
    config = make_config("wandb")
    config.tracking.offline = False
    with RunFolderRecorder(config, tmp_path) as recorder:
        start = time.monotonic()
        recorder.log(1, metrics(1))
        assert time.monotonic() - start < 0.5
    assert len(warnings(tmp_path)) == 1
    assert warnings(tmp_path)[0].startswith("wandb ")
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"


class Slow:
    """A dashboard that blocks until `go` is set."""

    def __init__(self):
        self.go = threading.Event()
        self.received = []

    def log(self, step, metrics):
        self.go.wait(20)
        if step == 3:
            raise ConnectionError("gone for a moment")
        self.received.append(step)

    def alert(self, step, title, text):
        self.received.append(title)

    def close(self, status):
        self.received.append(status)


def make_options(tmp_path, warned):
    return DashboardOptions({}, tmp_path / "slow", "project", "run", True, None, warned.append)


def test_a_slow_dashboard_drops_and_counts_what_its_queue_cannot_hold(tmp_path, monkeypatch):
    slow = Slow()
    warned = []
    monkeypatch.setattr(dashboards, "open_dashboard", lambda name, options: slow)
    worker = DashboardWorker("slow", make_options(tmp_path, warned), capacity=4)
    start = time.monotonic()
    for step in range(100):
        worker.log(step, {"lr": 1.0})
        time.sleep(0.001)
    assert time.monotonic() - start < 5
    slow.go.set()
    worker.close("finished", 10)
    assert worker.dropped >= 94
    assert slow.received[-1] == "finished"
    assert warned[0] == "slow is too slow: messages that do not fit its queue are dropped."
    assert warned[-1] == f"slow was too slow: {worker.dropped} messages were dropped."


def test_a_failed_message_is_reported_and_the_next_ones_are_sent(tmp_path, monkeypatch):
    slow = Slow()
    warned = []
    slow.go.set()
    monkeypatch.setattr(dashboards, "open_dashboard", lambda name, options: slow)
    worker = DashboardWorker("slow", make_options(tmp_path, warned))
    for step in (2, 3, 4):
        worker.log(step, {"lr": 1.0})
    worker.alert(4, "mismatch", "it grew")
    worker.close("failed", 10)
    assert slow.received == [2, 4, "mismatch", "failed"]
    assert warned == ["slow failed on a message; the run continues without it: gone for a moment"]


def test_a_dashboard_that_hangs_is_abandoned_at_the_deadline(tmp_path, monkeypatch):
    slow = Slow()
    warned = []
    monkeypatch.setattr(dashboards, "open_dashboard", lambda name, options: slow)
    worker = DashboardWorker("slow", make_options(tmp_path, warned))
    worker.log(1, {"lr": 1.0})
    start = time.monotonic()
    worker.close("finished", 0.2)
    assert time.monotonic() - start < 2
    assert warned == ["slow did not finish within 0 s; the run ends without it."]
    slow.go.set()


def test_progress_keeps_the_run_and_the_last_step_for_a_resume_only(tmp_path):
    path = tmp_path / "tracking/x.json"
    first = Progress(path, resumed=False)
    first.opened("abc")
    for step in (1, 2, 3):
        assert first.is_new(step)
        first.sent(step)
    second = Progress(path, resumed=True)
    assert (second.run_id, second.is_new(3), second.is_new(4)) == ("abc", False, True)
    assert Progress(path, resumed=False).run_id is None

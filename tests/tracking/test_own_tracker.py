"""A tracker of the user's own, named by its path in `tracking.use`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.config.tracking import TrackingConfig
from app.tracking import own_tracker
from app.tracking.own_tracker import require_trackers
from app.utils import dotted_path
from tests.refusals import refused
from tests.tracking.records import group, metrics, offline, record, warnings

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

class Minimal:
    def __init__(self, run):
        self.run = run
    def log(self, step, metrics):
        self.run.folder.parent.mkdir(parents=True, exist_ok=True)
        (self.run.folder.parent / f"minimal_{step}").touch()

class Broken:
    def __init__(self, run):
        pass
    def log(self, step, metrics):
        raise ConnectionError(f"refused at step {step}")
    def close(self, status):
        raise SystemExit("no more")

class Mute:
    pass

class Silent:
    def __init__(self, run):
        pass

def factory(run):
    return Minimal(run)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The user's module, in the working directory."""
    name = f"tracker_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FULL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_tracker_of_the_working_directory_gets_the_run_and_everything_it_asks_for(
    tmp_path: Path, module: str
) -> None:
    from app.tracking.recorder import RunFolderRecorder

    config = offline(f"{module}.Tracker")
    config.tracking.args = {"url": "http://x"}
    run = tmp_path / "runs" / "mine"
    with RunFolderRecorder(config, run) as recorder:
        recorder.log_eval(0, {"eval": {"accuracy": 0.25}}, [group(0, [1.0])])
        recorder.log(1, {**metrics(1), "lr": 0.5, "loss/policy": float("nan")})
        recorder.log(2, {**metrics(2), "reward/failed_fraction": 0.5})

    path = run / "tracking" / f"{module}.Tracker" / "lines.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == ["open", "http://x", "hydra-posttrain", "runs/mine", 3]
    assert lines[1] == ["samples", 0, "eval", [["text 0", 1.0]]]
    assert lines[2] == ["log", 0, {"eval/accuracy": 0.25}]
    assert lines[3][:2] == ["log", 1]
    assert lines[3][2]["train/lr"] == 0.5
    assert "loss/policy" not in lines[3][2]
    assert lines[-1] == ["close", "finished"]
    alerts = [line for line in lines if line[0] == "alert"]
    assert len(alerts) == 1


def test_several_trackers_work_side_by_side_and_methods_that_are_missing_are_skipped(
    tmp_path: Path, module: str
) -> None:
    run = tmp_path / "run"
    record(offline("tensorboard", f"{module}.Minimal", f"{module}.factory"), run, (1, 2))
    assert warnings(run) == []
    assert sorted(each.name for each in (run / "tracking").glob("minimal_*")) == ["minimal_0", "minimal_1", "minimal_2"]
    assert list((run / "tracking/tensorboard").iterdir())


def test_a_tracker_that_always_fails_is_one_warning_with_its_line_and_the_run_finishes(
    tmp_path: Path, module: str
) -> None:
    run = tmp_path / "run"
    record(offline(f"{module}.Broken"), run, (1, 2, 3))
    failed, unclosed = warnings(run)
    assert re.match(rf"{module}.Broken failed .*ConnectionError: refused at step 0 at ", failed)
    assert failed.endswith(f"{module}.py:31")
    assert re.match(rf"{module}.Broken .*closed.*SystemExit: no more", unclosed)
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("path", "args", "reason"),
    [
        ("no_such_module.Tracker", {}, "there is no module no_such_module (searched the working directory"),
        ("{module}.Missing", {}, "module {module} has no Missing"),
        ("{module}.Mute", {}, "TypeError: too many positional arguments"),
        ("{module}.Tracker", {"uri": "x"}, "TypeError: got an unexpected keyword argument 'uri'"),
        ("{module}.Silent", {}, "it has no method log"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused(module: str, path: str, args: dict[str, Any], reason: str) -> None:
    path = path.replace("{module}", module)
    with refused("tracking.use", path, reason.replace("{module}", module)):
        require_trackers(TrackingConfig(use=["tensorboard", path], args=args))


def test_an_import_that_hangs_is_refused_at_a_deadline(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dotted_path, "IMPORT_TIMEOUT_S", 0.2)
    (tmp_path / "stuck_tracker.py").write_text("import threading\nthreading.Event().wait(30)\n")
    with refused("tracking.use", "stuck_tracker.Tracker", "0.2 s"):
        require_trackers(TrackingConfig(use=["stuck_tracker.Tracker"]))


def test_the_installed_command_finds_a_tracker_of_the_working_directory(tmp_path: Path, module: str) -> None:
    """Its sys.path does not start with the working directory, as that of `python -m` does."""
    code = (
        "import sys; sys.path.pop(0)\n"
        "from app.config.tracking import TrackingConfig\n"
        "from app.tracking.own_tracker import require_trackers\n"
        f"require_trackers(TrackingConfig(use=['{module}.Tracker']))\n"
        "print('accepted')\n"
    )
    root = str(Path(own_tracker.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "accepted\n", done.stderr

"""Everything that a run sends to W&B is in its `.wandb` files."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import psutil

from app.cluster.process_reaper import process_reaper
from tests.folders import warnings
from tests.tracking.records import offline, record
from tests.tracking.wandb_file import recorded
from tests.waiting import until

CONFIG = offline("wandb")


def test_offline_keeps_history_config_and_run_id_across_a_resume_although_processes_are_reaped(tmp_path: Path) -> None:
    with process_reaper():
        record(CONFIG, tmp_path, (1, 2, 3))
    with process_reaper():  # as of the next job of a sweep
        record(CONFIG, tmp_path, (3, 4), resumed_at=2)
    assert len(warnings(tmp_path)) == 1  # the third step of the first attempt stays
    first, second = recorded(tmp_path)
    assert first.run_id == second.run_id == json.loads((tmp_path / "tracking/wandb.json").read_text())["run_id"]
    assert first.column("reward/mean") == {1: 0.1, 2: 0.2, 3: 0.3}
    assert second.column("reward/mean") == {4: 0.4}
    assert (first.history[0]["eval/accuracy"], first.history[1]["train/lr"]) == (0.25, 0.5)
    assert first.config["algorithm"]["group_size"] == 8
    assert (first.exit_codes, second.exit_codes) == ([0], [0])


KILLED = """
import sys, time
from pathlib import Path
from app.cluster.process_reaper import process_reaper
from app.tracking.recorder import RunFolderRecorder
from app.tracking.wandb import WeightsAndBiases
from tests.tracking.records import metrics, offline

log = WeightsAndBiases.log


def log_and_tell(self, step, metrics):
    log(self, step, metrics)
    if step == 3:
        Path(sys.argv[1], "logged").touch()


WeightsAndBiases.log = log_and_tell
with process_reaper(), RunFolderRecorder(offline("wandb"), Path(sys.argv[1])) as recorder:
    for step in (1, 2, 3):
        recorder.log(step, metrics(step))
    time.sleep(1000)
"""


def test_a_killed_driver_leaves_no_helper_and_its_resume_sends_what_was_not_confirmed(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.DEVNULL)
    process = psutil.Process(driver.pid)
    until((tmp_path / "logged").exists, 60)
    helpers = process.children(recursive=True)
    assert any(each.name().startswith("wandb-core") for each in helpers)
    driver.kill()
    driver.wait(10)
    _, left = psutil.wait_procs(helpers, timeout=30)
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in left)

    record(CONFIG, tmp_path, (3, 4), resumed_at=2)
    second = recorded(tmp_path)[-1]
    assert second.run_id == json.loads((tmp_path / "tracking/wandb.json").read_text())["run_id"]
    assert second.column("reward/mean") == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    assert second.exit_codes == [0]
    assert warnings(tmp_path) == []


def test_without_a_key_it_records_offline_and_never_prompts_even_on_a_terminal(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from app.tracking.dashboards import DashboardOptions\n"
        "from app.tracking.wandb import WeightsAndBiases\n"
        "run = Path(sys.argv[1])\n"
        "warn = lambda text: print('warned:', text)\n"
        "folders = run / 'tracking/wandb', run / 'metrics.jsonl'\n"
        "options = DashboardOptions({}, *folders, 'project', 'run', False, None, warn)\n"
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
    assert done.stdout.count("warned: ") == 1
    assert list((tmp_path / "tracking/wandb").glob("offline-run-*/*.wandb"))

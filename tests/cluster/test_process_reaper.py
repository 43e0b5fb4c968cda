"""The processes of a run end with its driver; processes that the driver started outside of the run do not."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from app.cluster.process_reaper import LOOK_SECONDS
from tests.rollout.support import until

DRIVER = """
import subprocess, time
from app.cluster.process_reaper import process_reaper

bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with process_reaper():
    # a daemon whose child has no mark, like a process that wrote its title over its environment
    daemon = subprocess.Popen(["sh", "-c", "env -i sleep 1001 & wait"], start_new_session=True)
    print(bystander.pid, daemon.pid, flush=True)
    time.sleep(1000)
"""


def test_a_killed_drivers_processes_end_also_without_their_mark() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    bystander, daemon = (psutil.Process(int(pid)) for pid in driver.stdout.readline().split())
    try:
        time.sleep(LOOK_SECONDS + 2)
        (child,) = daemon.children()
        assert "POSTTRAIN_RUN" in daemon.environ()
        assert "POSTTRAIN_RUN" not in child.environ()
        driver.kill()
        driver.wait(10)
        _, left = psutil.wait_procs([daemon, child], timeout=8)
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)
        assert bystander.is_running()
    finally:
        for process in (bystander, daemon):
            with suppress(psutil.NoSuchProcess):
                process.kill()

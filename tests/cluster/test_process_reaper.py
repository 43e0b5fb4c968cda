"""The processes of a run end with its driver; processes that the driver started outside of the run do not."""

import subprocess
import sys
from contextlib import suppress

import psutil

from tests.waiting import until

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


def wait_for_a_scan(driver: int) -> None:
    """Wait until the reaper has looked at all processes once more. It reads their files in /proc, then sleeps."""
    (reaper,) = [each for each in psutil.Process(driver).children() if "app.cluster.process_reaper" in each.cmdline()]
    for _ in range(2):  # the first scan may have begun before this call
        files_read = reaper.io_counters().read_count
        until(
            lambda: reaper.status() == psutil.STATUS_SLEEPING and reaper.io_counters().read_count > files_read,  # noqa: B023
            60,
        )


def test_a_killed_drivers_processes_end_also_without_their_mark() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    bystander, daemon = (psutil.Process(int(pid)) for pid in driver.stdout.readline().split())
    try:
        until(lambda: len(daemon.children()) == 1 and daemon.children()[0].name() == "sleep", 30)
        (child,) = daemon.children()
        wait_for_a_scan(driver.pid)
        assert "POSTTRAIN_RUN" in daemon.environ()
        assert "POSTTRAIN_RUN" not in child.environ()
        driver.kill()
        driver.wait(10)
        _, left = psutil.wait_procs([daemon, child], timeout=30)
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)
        assert bystander.is_running()
    finally:
        driver.kill()
        for process in (bystander, daemon):
            with suppress(psutil.NoSuchProcess):
                process.kill()

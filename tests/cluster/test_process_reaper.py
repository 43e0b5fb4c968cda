"""The processes and files of a run end with its driver; what the driver started outside of the run does not."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from app.cluster.process_reaper import process_reaper
from app.utils.process import SHARED_MEMORY
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


FILES = """
import os, subprocess, sys, tempfile, time
from app.cluster.process_reaper import process_reaper

WRITER = "import sys, tempfile, time; open(sys.argv[1], 'x'); print(tempfile.mkdtemp(), flush=True); time.sleep(99)"
outside = tempfile.mkdtemp()
with process_reaper():
    folder = tempfile.mkdtemp()
    marked = f"/dev/shm/posttrain-{os.environ['POSTTRAIN_RUN']}-of-a-test"
    command = [sys.executable, "-c", WRITER, marked]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    print(outside, folder, marked, writer.stdout.readline().strip(), flush=True)
    if sys.argv[1] == "killed":
        time.sleep(1000)
print(tempfile.gettempdir() == os.path.dirname(outside), flush=True)
"""


@pytest.fixture
def of_another_run() -> Iterator[Path]:
    """A file in shared memory that a living run may have."""
    path = SHARED_MEMORY / f"posttrain-{secrets.token_hex(4)}-of-a-test"
    path.touch()
    yield path
    path.unlink()


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_the_files_of_a_run_are_removed_and_no_others(end: str, tmp_path: Path, of_another_run: Path) -> None:
    """Those of the driver and of a process that is killed with the run, in shared memory and in its TMPDIR."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    driver = subprocess.Popen([sys.executable, "-c", FILES, end], stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    outside, *paths = (Path(each) for each in driver.stdout.readline().split())
    if end == "killed":
        assert all(path.exists() for path in paths)
        driver.kill()
    else:
        assert driver.stdout.readline() == "True\n"  # TMPDIR is that of before
    driver.wait(30)
    until(lambda: not any(path.exists() for path in paths), 30)
    assert list(tmp_path.iterdir()) == [outside]
    assert of_another_run.exists()


@pytest.mark.parametrize("ray", [None, "given", "r" * 60])
def test_a_run_has_temporary_folders_whose_paths_are_short_enough_for_sockets(
    ray: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's sockets are 70 bytes behind it, and a socket's path has at most 107. The files are where TMPDIR says."""
    long = tmp_path / ("a" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    if ray:
        (tmp_path / ray).mkdir()
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ray))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = dict(os.environ)
    with process_reaper():
        inside = [Path(os.environ[name]) for name in ("TMPDIR", "RAY_TMPDIR")]
        assert Path(tempfile.gettempdir()) == inside[0]
        assert inside[0].resolve().parent == long
        assert inside[1].resolve().parent == (tmp_path / ray if ray else long)
        assert max(len(str(each)) for each in inside) <= 37
        assert {path.stat().st_mode & 0o777 for path in inside} == {0o700}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(Path(tempfile.mkdtemp(prefix="posttrain-fork-")) / "socket"))
    assert dict(os.environ) == before
    assert not any(os.path.lexists(path) for path in inside)
    assert list(long.iterdir()) == []
    assert ray is None or list((tmp_path / ray).iterdir()) == []

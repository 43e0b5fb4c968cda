"""Kills the processes of a run and removes their files when its driver is gone, even if the driver was killed.

A small child process waits until the driver closes a pipe or dies. Then it kills every process with the run's mark in
its environment, which all processes of the run inherit (Ray's, ours, SGLang's), and their descendants that it found
while the driver was running: setting a process title may overwrite the environment, as in Ray's agents.

Then it removes the run's folder of temporary files, which all its processes have as TMPDIR (sockets of servers, Ray's
session, files of rewards and environments), and its files in shared memory.

Invariants:
    - What is removed has the run's mark, which no other run has, in its name.
    - Nothing is removed before the processes that use it are killed.
"""

import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from app.utils.child_environment import for_children, home_is_writable, make_home, replace_environment
from app.utils.process import MARK, SHARED_MEMORY, module_command, package_path, run_prefix

MARK_BYTES = 4
SCAN_INTERVAL_S = 3.0  # between two scans while the driver runs
ROUNDS = 20  # of killing
PAUSE_S = 0.25  # between two rounds
CLEANUP_TIMEOUT_S = 15.0
TEMPORARY, RAY_TEMPORARY = "TMPDIR", "RAY_TMPDIR"
RAY_PARENT_BYTES = 18  # of a path: Ray puts 70 bytes behind the run's folder, and a socket's path has at most 107
SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # where the folder is linked from, if its own path is longer
# A cache between runs that torch keeps among the temporary files.
COMPILED, COMPILED_DEFAULT = "TORCHINDUCTOR_CACHE_DIR", Path(".cache/hydra-posttrain/torchinductor")  # in the home


@contextmanager
def process_reaper() -> Iterator[None]:
    """Mark the processes started in the block; when the block or this process ends, kill them and remove their files.

    The block has a folder for temporary files of its own.
    """
    with _environment(_run_variables(secrets.token_hex(MARK_BYTES))):
        environment = {**os.environ, "PYTHONPATH": package_path(os.environ.get("PYTHONPATH"))}
        reaper = subprocess.Popen(
            module_command(__name__), env=environment, stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            yield
        finally:
            assert reaper.stdin is not None
            reaper.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                reaper.wait(ROUNDS * PAUSE_S + CLEANUP_TIMEOUT_S)


def _run_variables(mark: str) -> dict[str, str]:
    """Make the folders of a run's temporary files. Returns what its processes inherit: its mark, and these places."""
    folder = temporary_folder(tempfile.gettempdir(), f"posttrain-{mark}")
    ray_parent = os.environ.get(RAY_TEMPORARY)
    ray_folder = folder if ray_parent is None else temporary_folder(ray_parent, f"ray-{mark}")
    variables = {MARK: mark, TEMPORARY: folder, RAY_TEMPORARY: ray_folder}
    home = Path("~").expanduser()
    if not home_is_writable():
        home = Path(folder, "home")
        make_home(home)
        variables["HOME"] = str(home)
    return {**variables, COMPILED: os.environ.get(COMPILED, str(home / COMPILED_DEFAULT))}


def temporary_folder(parent: str, name: str) -> str:
    """Make a folder in `parent` and return a path to it that is short enough for sockets: a link, if need be."""
    folder = Path(parent, name)
    folder.mkdir(mode=0o700, exist_ok=True)
    short = next((place for place in SHORT if os.access(place, os.W_OK | os.X_OK)), parent)
    if len(os.fsencode(parent)) <= RAY_PARENT_BYTES or short == parent:
        return str(folder)

    link = Path(short, name)
    link.symlink_to(folder)
    return str(link)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the environment of a run, with these variables, in the block."""
    before = dict(os.environ)
    replace_environment({**for_children(before), **variables})
    tempfile.tempdir = None  # read from the environment again
    try:
        yield
    finally:
        replace_environment(before)
        tempfile.tempdir = None


def marked_processes(mark: str) -> set[psutil.Process]:
    """Return the processes with this mark and their descendants, without the calling process."""
    psutil.process_iter.cache_clear()  # a cached entry of a reused pid would be of the process that had it before

    marked = set()
    children = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            children[process.ppid()].append(process)
            if process.environ().get(MARK) == mark:
                marked.add(process)
    marked.discard(psutil.Process())

    parents = list(marked)
    while parents:
        parents = [child for parent in parents for child in children[parent.pid] if child not in marked]
        marked.update(parents)
    return marked


def alive(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Return the processes that still run. Zombies and reused pids do not count."""
    running = set()
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.add(process)
    return running


def remove_files() -> None:
    """Remove the temporary files of the run whose mark this process has, and its files in shared memory."""
    folders = {Path(os.environ[variable]) for variable in (TEMPORARY, RAY_TEMPORARY)}
    targets = {folder.resolve() for folder in folders}
    for path in (*targets, *(folders - targets), *SHARED_MEMORY.glob(f"{run_prefix()}*")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def main() -> None:
    """Wait for the driver's end, then kill until nothing is left, and remove the files."""
    mark = os.environ[MARK]
    seen: set[psutil.Process] = set()

    while not select.select([sys.stdin], [], [], SCAN_INTERVAL_S)[0]:
        seen = alive(seen | marked_processes(mark))

    for _ in range(ROUNDS):
        seen = alive(seen | marked_processes(mark))
        if not seen:
            break
        for process in seen:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(PAUSE_S)
    remove_files()


if __name__ == "__main__":
    main()

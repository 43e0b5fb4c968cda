"""Nothing of a run stays in shared memory or among the temporary files, whatever was killed.

The run has folders of its own in their places: `/dev/shm` of a mount namespace, and TMPDIR.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runs import Run
from tests.waiting import until

PRIVATE = 'mount --bind "$0" /dev/shm && exec "$@"'
RUNS = {
    "colocate": ["placement=colocate"],
    "fully_async": ["placement=fully_async"],
    "lora": ["model=tiny_lora", "placement=colocate"],
}
COMMON = [
    "eval.before_train=false",
    "data.arithmetic.eval_problems=20",
    "checkpoint.every=1",
    "checkpoint.export=false",
]


class Folders:
    """The folders that a run has as `/dev/shm` and as TMPDIR."""

    def __init__(self, folder: Path, temporary: Path):
        self.shared_memory = folder / "shared_memory"
        self.shared_memory.mkdir()
        self.temporary = temporary

    @property
    def files(self) -> list[str]:
        return sorted(each.name for folder in (self.shared_memory, self.temporary) for each in folder.iterdir())


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folders]:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespaces for this user")
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a short path, for Ray's sockets
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield Folders(tmp_path, temporary)
    shutil.rmtree(temporary)


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, folders: Folders) -> Iterator[Callable[..., Run]]:
    """Starts a run in its mount namespace."""
    runs: list[Run] = []

    def start_run(*overrides: str, module: str = "app") -> Run:
        prefix = ["unshare", "--mount", "sh", "-c", PRIVATE, str(folders.shared_memory)]
        runs.append(Run(tmp_path, *overrides, *COMMON, module=module, prefix=prefix, imports_sglang=True))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", list(RUNS.values()), ids=list(RUNS))
def test_after_kill_9_of_an_engine_of_a_rank_and_of_the_driver(
    overrides: list[str], start: Callable[..., Run], folders: Folders
) -> None:
    run = start("steps=500", *overrides)
    for part in ("sglang::scheduler", "TrainerRank"):
        run.wait_for_step(len(run.metrics()) + 2)
        os.kill(run.pid_of(part), signal.SIGKILL)
    run.wait_for_step(run.metrics()[-1]["step"] + 3)
    files = folders.files
    assert any("sglang_loads" in name for name in files)
    run.process.kill()
    run.process.wait(10)
    assert run.gone_within(30), run.processes()
    until(lambda: folders.files == [], 15)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("overrides", list(RUNS.values()), ids=list(RUNS))
def test_after_a_run_that_ends(overrides: list[str], start: Callable[..., Run], folders: Folders) -> None:
    run = start("steps=2", *overrides)
    assert run.wait() == 0, run.text
    assert folders.files == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_after_an_interrupt_in_a_weight_sync(
    start: Callable[..., Run], folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLD", "sync")
    monkeypatch.setenv("HOLD_FOLDER", str(tmp_path))
    run = start("steps=500", "weight_sync.bucket_mib=0.1", module="tests.cluster.held_app")
    until(lambda: (tmp_path / "held").exists() or run.process.poll() is not None, 200)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(100) == 130, run.text
    assert folders.files == []

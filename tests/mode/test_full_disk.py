"""A disk that is full, read-only or not a disk at all: one sentence, an exit code, and nothing half written."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from app.config import RunConfig
from app.tracking.recorder import RunFolderRecorder
from app.utils.files import append, overwrite, replace_file
from tests.folders import json_lines, run_app
from tests.runs import Run

Mount = Callable[..., Path]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a tmpfs of this size at `disk`; several in one test replace each other."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str, *options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
        return folder

    yield mount
    while subprocess.run(["umount", str(folder)], capture_output=True).returncode == 0:
        pass


def fill(folder: Path) -> None:
    """Write until nothing more fits."""
    with (folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))


@pytest.mark.parametrize(("key", "sweep"), [("hydra.run.dir", []), ("hydra.sweep.dir", ["-m", "seed=0,1"])])
def test_a_read_only_folder_is_refused(key: str, sweep: list[str], tmp_path: Path, mounted: Mount) -> None:
    disk = mounted("64k", "ro")
    code, text = run_app(f"{key}={disk / 'some' / 'run'}", *sweep, cwd=tmp_path)
    assert (code, text.split()[0], text.count("\n")) == (2, f"{key}={disk / 'some' / 'run'}", 1)
    assert f"{disk} is read-only" in text


def test_a_full_disk_leaves_whole_files_and_the_status_failed(mounted: Mount) -> None:
    def run() -> None:
        with RunFolderRecorder(RunConfig(steps=10_000), folder) as recorder:
            for step in range(1, 10_000):
                recorder.log(step, {"policy_version": step, "reward/mean": 0.5, "time/step": 1.0})
                if step == 1:
                    fill(folder.parent)

    folder = mounted("128k") / "run"
    with pytest.raises(OSError, match="No space left"):
        run()

    summary = json.loads((folder / "summary.json").read_text())
    steps = summary["steps"]
    assert 1 < steps < 9_999
    assert [row["step"] for row in json_lines(folder / "metrics.jsonl")] == list(range(1, steps + 1))
    assert summary["status"] == "failed"
    assert "No space left on device" in summary["error"]
    assert list(folder.glob("*.tmp")) == []


def test_a_file_that_does_not_fit_keeps_its_content(mounted: Mount) -> None:
    disk = mounted("64k")
    replace_file(disk / "file", "a" * 100)
    append(disk / "lines", "first\n")
    fill(disk)
    for write in (replace_file, overwrite):
        with pytest.raises(OSError, match="No space left"):
            write(disk / "file", "b" * 6000)  # of which one page would fit in place
    with pytest.raises(OSError, match="No space left"):
        append(disk / "lines", "x" * 6000 + "\n")
    assert (disk / "file").read_text() == "a" * 100
    assert sorted(os.listdir(disk)) == ["file", "filler", "lines"]

    overwrite(disk / "file", "b" * 50)  # in place
    (disk / "filler").unlink()
    append(disk / "lines", "second\n")
    assert (disk / "file").read_text() == "b" * 50
    assert (disk / "lines").read_text() == "first\nsecond\n"


@pytest.mark.slow
def test_a_run_whose_disk_fills_up_ends_with_its_sentence(mounted: Mount, tmp_path: Path, tiny_model: Path) -> None:
    folder = mounted("128k") / "run"
    folder.mkdir()
    (tmp_path / "run").symlink_to(folder)
    run = Run(tmp_path, "steps=200", "eval.before_train=false", "eval.every=0")
    try:
        assert run.wait() == 1
        assert run.gone_within(10)
    finally:
        run.end()

    assert "Traceback" not in run.text
    assert "cannot be written: " in run.text.splitlines()[-1]
    assert "No space left on device" in run.text.splitlines()[-1]
    assert run.summary()["status"] == "failed"
    assert [line["step"] for line in run.metrics()] == list(range(1, run.summary()["steps"] + 1))
    assert list(folder.rglob("*.tmp")) == []

"""A tree without app/cpu_engine/ and its entry point runs as this one does, slower."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.folders import ROOT
from tests.runs import Run

QUICK = ["steps=1", "algorithm.prompts_per_step=2", "algorithm.group_size=2", "eval.every=0", "eval.before_train=false"]
ENTRY_POINT = "cpu_engine"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of this tree without the room, installed: its metadata come before those of this tree."""
    root = tmp_path / "tree"
    for name in ("app", "conf"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("cpu_engine", "__pycache__"))

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    del groups["sglang.srt.plugins"][ENTRY_POINT]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {path}\n" for name, path in each.items()) for group, each in groups.items()
    ]
    metadata = root / "hydra_posttrain-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hydra-posttrain\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return root


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_without_the_room_writes_what_a_run_with_it_writes(tree: Path, tmp_path: Path) -> None:
    def run(name: str, root: Path) -> Run:
        (tmp_path / name).mkdir()
        return Run(tmp_path / name, *QUICK, prefix=["env", "-C", str(root), f"PYTHONPATH={root}"], imports_sglang=True)

    with_room, without = run("with", ROOT), run("without", tree)
    try:
        for each in (with_room, without):
            assert each.wait() == 0, each.text
    finally:
        with_room.end()
        without.end()

    backends = {run: (run.folder / "logs" / "engine_0.log").read_text() for run in (with_room, without)}
    assert "torch_batched" in backends[with_room]
    assert "torch_batched" not in backends[without]
    assert [line.keys() for line in without.metrics()] == [line.keys() for line in with_room.metrics()]
    assert files(with_room.folder) - files(without.folder) == {"logs/fork_server.log"}
    assert files(without.folder) <= files(with_room.folder)


def test_the_device_without_the_room_forks_no_engines_and_changes_no_rank(tree: Path) -> None:
    code = "from app.device.cpu import DEVICE; print(DEVICE.fork_server, DEVICE.prepare_rank)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "None None\n", done.stderr

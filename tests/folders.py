"""What runs leave in their folders, made without a run, and the exact content of a folder."""

import hashlib
import json
import os
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from app.checkpoint.folder import FOLDER, LATEST
from app.checkpoint.run_state import RunState, write_state
from app.main import conf_path
from app.recovery.saved_config import SAVED
from tests.warm import run_warm

ROOT = Path(__file__).parent.parent


def composed_by_hydra(*overrides: str) -> DictConfig:
    """The composition of a command line, Hydra's own settings included, for the caller to change."""
    return deepcopy(_composed_by_hydra(overrides))


@cache
def _composed_by_hydra(overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(conf_path(), version_base="1.3"):
        made = compose("config", list(overrides), return_hydra_config=True)
    with open_dict(made):
        made.hydra.overrides.task = [each for each in overrides if not each.startswith("hydra.")]
    return made


def a_run(
    folder: Path,
    *overrides: str,
    step: int | None = None,
    status: str = "failed",
    reached: int = 1,
    accuracy: float = 0.5,
) -> Path:
    """A run that trained `reached` steps; with the checkpoint of `step` if given."""
    made = composed_by_hydra(*overrides)
    with open_dict(made):
        del made["hydra"]
    (folder / SAVED).parent.mkdir(parents=True)
    (folder / SAVED).write_text(OmegaConf.to_yaml(made))
    lines = [json.dumps({"step": each + 1, "time/step": 1.0}) + "\n" for each in range(reached)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "summary.json").write_text(
        json.dumps({"status": status, "steps": reached, "eval/accuracy_last": accuracy})
    )
    if step is not None:
        checkpoint = folder / FOLDER / f"step_{step}"
        checkpoint.mkdir(parents=True)
        write_state(checkpoint, RunState(step, step), {})
        (folder / FOLDER / LATEST).write_text(checkpoint.name)
    return folder


def content(folder: Path) -> dict[str, str]:
    """Every file and folder below, with a hash of each file's bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def json_lines(path: Path) -> list[Any]:
    """The objects of a file that has one a line; none without the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def warnings(folder: Path) -> list[str]:
    """The texts of a run's warnings."""
    return [line["text"] for line in json_lines(folder / "logs" / "warnings.jsonl")]


def start_app(*arguments: str, cwd: Path, module: str = "app") -> subprocess.Popen[str]:
    """Start the command in another folder. Its output is one stream."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_app(*arguments: str, cwd: Path, module: str = "app") -> tuple[int, str]:
    """Run the command to its end, in a warm process; return its exit code and its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = run_warm(*arguments, cwd=cwd, environment=environment, module=module, one_stream=True)
    return ended.returncode, ended.stdout


def python(*words: str, cwd: Path = ROOT, **environment: str) -> str:
    """The output of a new process of Python, which finds this checkout and must end with 0."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_new_app(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Run the command to its end, in a new process, for what imports torch."""
    process = start_app(*arguments, cwd=cwd)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, output

"""Which folder and which settings a resumed run gets."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from app.checkpoint.folder import FOLDER, LATEST
from app.errors import ConfigError, RunError
from app.main import conf_path
from app.recovery.resume import SAVED, apply_resume, finished_at, run_lock


def composed(*overrides: str) -> DictConfig:
    """As Hydra composes it for a command line."""
    with initialize_config_dir(conf_path(), version_base="1.3"):
        made = compose("config", list(overrides), return_hydra_config=True)
    with open_dict(made):
        made.hydra.overrides.task = [each for each in overrides if not each.startswith("hydra.")]
    return made


def a_run(folder: Path, *overrides: str, step: int | None = None) -> Path:
    """What a run leaves in its folder, as far as it matters here."""
    made = composed(*overrides)
    with open_dict(made):
        del made["hydra"]
    (folder / SAVED).parent.mkdir(parents=True)
    (folder / SAVED).write_text(OmegaConf.to_yaml(made))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    if step is not None:
        point = folder / FOLDER / f"step_{step}"
        point.mkdir(parents=True)
        (point / "state.json").write_text(f'{{"format": 1, "step": {step}, "version": {step}, "files": {{}}}}')
        (folder / FOLDER / LATEST).write_text(point.name)
    return folder


def test_the_saved_configuration_wins_but_for_what_may_be_given_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "algorithm=dapo", "algorithm.group_size=4", "steps=10", "placement=fully_async")
    made = composed(
        f"hydra.run.dir={run}", "resume=auto", "steps=30", "trainer.lr=0.5", "algorithm.group_size=4",
        "placement.trainer_devices=2", "eval.every=7",
    )  # fmt: skip
    said = apply_resume(made)
    assert (made.algorithm.name, made.algorithm.group_size, made.placement.kind.name) == ("dapo", 4, "fully_async")
    assert (made.steps, made.placement.trainer_devices, made.eval.every) == (30, 2, 7)
    assert made.trainer.lr != 0.5
    assert said == ["trainer.lr is ignored: a resumed run keeps its saved value"]


def test_a_group_given_otherwise_is_told(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "algorithm=grpo")
    made = composed(f"resume={run}", "algorithm=gspo")
    (said,) = apply_resume(made)
    assert said.startswith("algorithm is ignored")
    assert made.algorithm.name == "grpo"
    assert made.hydra.run.dir == str(run)


def test_resume_auto_begins_a_run_where_there_is_none(tmp_path: Path) -> None:
    made = composed(f"hydra.run.dir={tmp_path / 'new'}", "resume=auto", "steps=3")
    assert apply_resume(made) == []
    assert (made.steps, finished_at(made)) == (3, None)


def test_a_used_folder_is_refused_without_resume(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"it already holds a run; give resume=auto to continue it"):
        apply_resume(composed(f"hydra.run.dir={run}"))


@pytest.mark.parametrize("what", ["nowhere", "file"])
def test_what_is_no_run_is_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^resume=.* is not accepted: give auto, never, a run's folder"):
        apply_resume(composed(f"resume={tmp_path / what}"))


def test_a_checkpoint_may_be_named_instead_of_a_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    made = composed(f"resume={run}/checkpoints/step_4", "steps=9")
    apply_resume(made)
    assert (made.hydra.run.dir, finished_at(made)) == (str(run), None)


@pytest.mark.parametrize(("steps", "finished"), [(4, 4), (3, 4), (5, None)])
def test_a_finished_run_has_nothing_left_to_do(steps: int, finished: int | None, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    made = composed(f"resume={run}", f"steps={steps}")
    apply_resume(made)
    assert finished_at(made) == finished


def test_a_configuration_of_another_version_is_told(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / SAVED).write_text((run / SAVED).read_text() + "unheard_of: 1\n")
    with pytest.raises(ConfigError, match=r"config.yaml is not a configuration of this version: "):
        apply_resume(composed(f"resume={run}"))


def test_two_drivers_of_one_run_are_one_too_many(tmp_path: Path) -> None:
    second = pytest.raises(RunError, match="is in use: another process is running this run")
    with run_lock(tmp_path), second, run_lock(tmp_path):
        raise AssertionError("two drivers")
    with run_lock(tmp_path):
        pass


def app(*arguments: str, cwd: Path) -> Any:
    command = [sys.executable, "-m", "app", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", step=4)
    refused = app(f"hydra.run.dir={run}", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    finished = app(f"resume={run}", "steps=4", cwd=tmp_path)
    assert finished.returncode == 0
    assert finished.stderr == f"the run in {run} finished at step 4: give a larger steps=… to continue it.\n"
    sweep = app("-m", "resume=auto", "seed=0,1", cwd=tmp_path)
    assert "resume=auto is not accepted: give never in a sweep" in sweep.stderr

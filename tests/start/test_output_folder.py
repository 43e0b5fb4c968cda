"""Whose folder it is: refused starts change nothing, default folders differ, and nothing finished is overwritten."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from app.errors import RunError
from app.recovery.run_lock import LOCK, FolderInUse, run_lock
from app.start.output_folder import output_folder
from app.start.settle import settle
from app.tracking.recorder import RunFolderRecorder
from tests.folders import a_run, composed_by_hydra, content, json_lines, run_app, start_app
from tests.waiting import until

HELD = "tests.mode.held_app"


def test_of_two_starts_into_one_folder_in_the_same_second_one_runs_with_its_own_settings(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    rates = (1e-4, 3e-4)
    drivers = [start_app(f"hydra.run.dir={run}", f"trainer.lr={rate}", cwd=tmp_path, module=HELD) for rate in rates]
    try:
        until(lambda: any(driver.poll() is not None for driver in drivers), 240)  # one is refused
        until((run / "metrics.jsonl").exists, 240)
        (tmp_path / "go").touch()
        ended = [(driver.communicate(timeout=240)[0], driver.returncode) for driver in drivers]
    finally:
        for driver in drivers:
            driver.kill()

    codes = [code for _, code in ended]
    assert sorted(codes) == [0, 1], ended
    refused, ran = codes.index(1), codes.index(0)
    host = (run / "driver.lock").read_text().split()[-1]
    assert ended[refused][0] == f"{run} is in use: process {drivers[ran].pid} on {host} is writing to it\n"
    assert [row["lr"] for row in json_lines(run / "metrics.jsonl")] == [rates[ran]]
    assert f"lr: {rates[ran]}" in (run / "config" / "config.yaml").read_text()
    assert (run / "config" / "overrides.yaml").read_text() == f"- trainer.lr={rates[ran]}\n"


@pytest.mark.parametrize("words", [[], ["-m"]], ids=["runs", "sweeps"])
def test_runs_and_sweeps_started_in_the_same_second_get_folders_of_their_own(
    words: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    rates = ("0.1,0.3", "0.1,0.3") if words else ("0.1", "0.3")
    drivers = [start_app(*words, f"trainer.lr={rate}", cwd=tmp_path, module=HELD) for rate in rates]
    ended = [(driver.communicate(timeout=240)[0], driver.returncode) for driver in drivers]
    assert [code for _, code in ended] == [0, 0], ended
    folders = sorted((tmp_path / "outputs" / ("sweeps" if words else "tiny-grpo-colocate")).iterdir())
    assert [folder.name[:20] for folder in folders] == ["2026-01-02_03-04-05_"] * 2
    files = [path for folder in folders for path in folder.rglob("metrics.jsonl")]
    assert sorted(json_lines(path)[0]["lr"] for path in files) == sorted(map(float, ",".join(rates).split(",")))


def test_the_folder_of_an_earlier_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    a_run(tmp_path / "sweep" / "0-seed=0")
    before = content(tmp_path)
    code, text = run_app("-m", "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path, module=HELD)
    assert (code, content(tmp_path)) == (2, before)
    assert text.startswith(f"hydra.sweep.dir={tmp_path / 'sweep'} ")


def test_each_job_of_a_sweep_has_one_folder_whatever_its_overrides_are(tiny_model: Path, tmp_path: Path) -> None:
    """Paths have slashes, and a prompt may be longer than the name of a folder."""
    (tmp_path / "go").touch()
    sweep = tmp_path / "sweep"
    long = f"../{'long/' * 80}é"
    code, text = run_app(
        "-m", "seed=0,1", f"data.prefix='{long}'", f"hydra.sweep.dir={sweep}", cwd=tmp_path, module=HELD
    )
    assert code == 0, text
    runs = sorted(path.parent for path in tmp_path.rglob("summary.json"))
    assert [run.name.partition("-")[0] for run in runs] == ["0", "1"]
    assert {run.parent for run in runs} == {sweep}
    assert (sweep / "report.html").is_file()


@pytest.mark.parametrize(
    ("mode", "advice"), [("train", "resume=auto"), ("eval", "resume={run}"), ("parity", "another folder")]
)
def test_no_mode_writes_into_the_folder_of_a_run(mode: str, advice: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", status="finished")
    before = content(tmp_path)
    code, text = run_app(f"mode={mode}", f"hydra.run.dir={run}", cwd=tmp_path)
    assert (code, content(tmp_path)) == (2, before)
    assert text.startswith(f"hydra.run.dir={run} ")
    assert advice.format(run=run) in text


def test_a_run_that_died_before_its_first_checkpoint_starts_over_with_its_records_set_aside(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    line = ["resume=auto", "checkpoint.every=5", f"hydra.run.dir={tmp_path / 'run'}"]
    run = a_run(tmp_path / "run", "checkpoint.every=5", reached=3)
    (run / "notes.txt").write_text("not ours")
    before = content(run)
    for attempt in (1, 2):
        code, text = run_app(*line, cwd=tmp_path, module=HELD)
        assert code == 0, text
        aside = run / f"aside_{attempt}"
        assert f" {aside}\n" in text
        assert [row["step"] for row in json_lines(run / "metrics.jsonl")] == [1]
        (run / "summary.json").write_text('{"status": "failed", "steps": 1}')  # died again before a checkpoint

    moved = content(run / "aside_1")
    assert moved == {name: digest for name, digest in before.items() if name != "notes.txt"}
    assert [row["step"] for row in json_lines(run / "aside_2" / "metrics.jsonl")] == [1]
    assert (run / "notes.txt").read_text() == "not ours"


@pytest.mark.parametrize("before", ["no run", "no checkpoint", "an older checkpoint"])
def test_a_run_that_another_process_continued_before_the_lock_was_free_is_left_alone(
    before: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    if before != "no run":
        a_run(run, "steps=9", step=2 if before == "an older checkpoint" else None)
    job = settle(composed_by_hydra("resume=auto", f"hydra.run.dir={run}", "checkpoint.every=2"), run)

    shutil.rmtree(run, ignore_errors=True)
    a_run(run, "steps=12", "trainer.lr=0.3", step=4, reached=4)  # the other process
    there = content(run)
    with pytest.raises(RunError) as refused, output_folder(job, job.config):
        pass
    assert str(run) in str(refused.value)
    assert {name: digest for name, digest in content(run).items() if name != "driver.lock"} == there


def test_a_value_of_the_environment_is_in_no_file_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a key. A resumed run reads it from its own environment."""
    monkeypatch.setenv("A_KEY", "x7-of-mine")
    composed = composed_by_hydra("reward._target_=my_rewards.judge", "reward.args.key=${oc.env:A_KEY}")
    job = settle(composed, tmp_path)
    config = job.config
    with output_folder(job, config), RunFolderRecorder(config, tmp_path) as recorder:
        assert recorder._options("wandb").config["reward"]["args"] == {"key": "${oc.env:A_KEY}"}
    assert config.reward.args == {"key": "x7-of-mine"}
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"x7-of-mine" in path.read_bytes()] == []
    saved = OmegaConf.load(tmp_path / "config" / "config.yaml")
    assert saved.reward.args.key == "x7-of-mine"
    assert saved.trainer.lr == config.trainer.lr


@pytest.mark.parametrize("words", ["mode=plan", "mode=export", "steps=0", "rollout.tensor_parallel=2"])
def test_a_mode_that_does_not_write_and_a_refused_start_leave_no_folder(words: str, tmp_path: Path) -> None:
    code, text = run_app(*words.split(), cwd=tmp_path)
    assert code == (0 if words == "mode=plan" else 2), text
    assert content(tmp_path) == {}


# --- the lock of a folder


def test_a_second_process_is_refused_with_the_name_of_the_first_and_changes_nothing(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        before = content(tmp_path)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(FolderInUse) as refused, run_lock(tmp_path):
            raise AssertionError("two drivers")
        assert str(tmp_path) in str(refused.value)
        assert str(holder) in str(refused.value)
        assert content(tmp_path) == before


def test_a_lock_that_is_released_is_taken_again_under_the_name_of_the_next(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 1 on a machine with a long name\n")
    for _ in range(2):
        with run_lock(tmp_path):
            assert (tmp_path / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/run.*Not a directory"), run_lock(tmp_path / "file/run"):
        raise AssertionError("locked")

"""Whose folder it is: refused starts change nothing, default folders differ, and nothing finished is overwritten."""

import json
import time
from pathlib import Path

import pytest

from app.recovery.run_lock import run_lock
from tests.folders import a_run, content, run_app, start_app

HELD = "tests.mode.held_app"


def metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(exists: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not exists.exists():
        assert time.monotonic() < deadline, f"no {exists} within {seconds} s"
        time.sleep(0.05)


def test_a_second_driver_is_refused_and_changes_no_byte_of_the_run(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    run = tmp_path / "run"
    with run_lock(run):
        a_run(run, "steps=3", "checkpoint.every=2")
        before = content(run)
        code, text = run_app("resume=auto", f"hydra.run.dir={run}", "steps=777", "checkpoint.every=333", cwd=tmp_path)
        assert (code, text) == (1, f"{run} is in use: {(run / 'driver.lock').read_text().strip()} is writing to it\n")
        assert content(run) == before


def test_of_two_starts_into_one_folder_in_the_same_second_one_runs_with_its_own_settings(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    rates = (1e-4, 3e-4)
    drivers = [start_app(f"hydra.run.dir={run}", f"trainer.lr={rate}", cwd=tmp_path, module=HELD) for rate in rates]
    try:
        deadline = time.monotonic() + 240
        while all(driver.poll() is None for driver in drivers):
            assert time.monotonic() < deadline, "neither driver was refused"
            time.sleep(0.05)
        wait_until(run / "metrics.jsonl")
        (tmp_path / "go").touch()
        ended = [(driver.communicate(timeout=240)[0], driver.returncode) for driver in drivers]
    finally:
        for driver in drivers:
            driver.kill()

    codes = [code for _, code in ended]
    assert sorted(codes) == [0, 1], ended
    refused, ran = codes.index(1), codes.index(0)
    assert ended[refused][0] == f"{run} is in use: process {drivers[ran].pid} on {host(run)} is writing to it\n"
    assert [row["lr"] for row in metrics(run)] == [rates[ran]]
    assert f"lr: {rates[ran]}" in (run / "config" / "config.yaml").read_text()
    assert (run / "config" / "overrides.yaml").read_text() == f"- trainer.lr={rates[ran]}\n"


def host(run: Path) -> str:
    return (run / "driver.lock").read_text().split()[-1]


def test_runs_started_in_the_same_second_get_folders_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    drivers = [start_app(f"seed={seed}", "model.path=" + str(tiny_model), cwd=tmp_path, module=HELD) for seed in (0, 1)]
    ended = [(driver.communicate(timeout=240)[0], driver.returncode) for driver in drivers]
    assert [code for _, code in ended] == [0, 0], ended
    folders = sorted((tmp_path / "outputs" / "tiny-grpo-colocate").iterdir())
    assert [folder.name[:20] for folder in folders] == ["2026-01-02_03-04-05_"] * 2
    seeds = {(folder / "config" / "overrides.yaml").read_text().splitlines()[0] for folder in folders}
    assert seeds == {"- seed=0", "- seed=1"}


def test_sweeps_started_in_the_same_second_get_folders_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    sweep = ["-m", "trainer.lr=0.1,0.3"]
    drivers = [start_app(*sweep, cwd=tmp_path, module=HELD) for _ in range(2)]
    ended = [(driver.communicate(timeout=240)[0], driver.returncode) for driver in drivers]
    assert [code for _, code in ended] == [0, 0], ended
    sweeps = sorted((tmp_path / "outputs" / "sweeps").iterdir())
    assert [folder.name[:20] for folder in sweeps] == ["2026-01-02_03-04-05_"] * 2
    for folder in sweeps:
        jobs = ["0-trainer.lr=0.1", "1-trainer.lr=0.3"]
        assert [path.name for path in sorted(folder.iterdir()) if path.is_dir()] == jobs
        assert [metrics(folder / job)[0]["lr"] for job in jobs] == [0.1, 0.3]
        assert (folder / jobs[1] / "config" / "overrides.yaml").read_text() == "- trainer.lr=0.3\n"


def test_the_folder_of_an_earlier_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    a_run(tmp_path / "sweep" / "0-seed=0")
    before = content(tmp_path)
    code, text = run_app("-m", "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path, module=HELD)
    assert (code, content(tmp_path)) == (2, before)
    assert text == (
        f"hydra.sweep.dir={tmp_path / 'sweep'} is not accepted: it already holds the runs of a sweep; give another "
        "folder.\n"
    )


@pytest.mark.parametrize(
    ("mode", "advice"),
    [
        ("train", "give resume=auto to continue it, or another folder"),
        ("eval", "give another folder, or resume={run} without hydra.run.dir to evaluate that run"),
        ("parity", "give another folder"),
    ],
)
def test_no_mode_writes_into_the_folder_of_a_run(mode: str, advice: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", status="finished")
    before = content(tmp_path)
    code, text = run_app(f"mode={mode}", f"hydra.run.dir={run}", cwd=tmp_path)
    assert (code, content(tmp_path)) == (2, before)
    assert text == f"hydra.run.dir={run} is not accepted: it already holds a run; {advice.format(run=run)}.\n"


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
        assert f"it starts over, and its records are now in {aside}\n" in text
        assert [row["step"] for row in metrics(run)] == [1]
        (run / "summary.json").write_text('{"status": "failed", "steps": 1}')  # died again before a checkpoint

    moved = content(run / "aside_1")
    assert moved == {name: digest for name, digest in before.items() if name != "notes.txt"}
    assert [row["step"] for row in metrics(run / "aside_2")] == [1]
    assert (run / "notes.txt").read_text() == "not ours"


def test_a_run_that_finished_without_checkpoints_is_left_alone_by_the_same_line(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    line = ["resume=auto", "steps=1", f"hydra.run.dir={tmp_path / 'run'}"]
    assert run_app(*line, cwd=tmp_path, module=HELD)[0] == 0
    before = content(tmp_path / "run")
    code, text = run_app(*line, cwd=tmp_path, module=HELD)
    assert (code, content(tmp_path / "run")) == (0, before)
    assert text.splitlines()[-1] == (
        f"the run in {tmp_path / 'run'} finished at step 1: give a larger steps=… to continue it."
    )

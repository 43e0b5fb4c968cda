"""`mode=export` and `mode=report` write into a run's folder, and only while no other process does."""

import os
import socket
from pathlib import Path

import pytest

from app.config import Mode, RunConfig
from app.config.model import ModelConfig
from app.config.tracking import TrackingConfig
from app.mode import export, report
from app.recovery.run_lock import FolderInUse, run_lock
from app.tracking.report.data import find_runs
from tests.checkpoint.test_export import trained
from tests.folders import a_run, content
from tests.model.support import save_qwen3
from tests.refusals import refused


def test_a_run_that_is_being_written_is_not_exported_into(tmp_path: Path, one_thread: None) -> None:
    source = save_qwen3(tmp_path / "source")
    run = tmp_path / "run"
    trained(source, run)
    config = RunConfig(model=ModelConfig(path=str(source)))
    with run_lock(run):
        before = content(run)
        with pytest.raises(FolderInUse, match=rf"run is in use: process {os.getpid()} on {socket.gethostname()} is"):
            export.export_run(config, run)
        assert content(run) == before
    assert export.export_run(config, run) == run / "export"


def test_the_report_of_a_run_that_is_being_written_is_beside_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    with run_lock(run):
        before = content(run)
        report.run(RunConfig(), run)
        assert content(run) == before
    assert capsys.readouterr().err == f"{tmp_path / 'run.report.html'}\n"
    assert (tmp_path / "run.report.html").is_file()

    report.run(RunConfig(), run)
    assert capsys.readouterr().err == f"{run / 'report.html'}\n"
    assert (run / "report.html").is_file()


def test_a_report_of_several_runs_is_in_their_common_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        a_run(tmp_path / name)
    before = content(tmp_path)
    report.run(RunConfig(), tmp_path)
    assert set(content(tmp_path)) - set(before) == {"report.html", "runs.csv"}


def comparing(*folders: Path) -> RunConfig:
    return RunConfig(mode=Mode.report, tracking=TrackingConfig(compare=[str(folder) for folder in folders]))


def test_listed_runs_are_compared_in_a_new_folder_and_stay_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = a_run(tmp_path / "a" / "one", "seed=1")
    two = a_run(tmp_path / "b" / "two", "seed=2", accuracy=0.75)
    before = content(tmp_path)
    monkeypatch.chdir(tmp_path)
    report.run(comparing(one, two), None)

    (folder,) = (tmp_path / "outputs" / "comparisons").iterdir()
    assert [line.split() for line in capsys.readouterr().err.splitlines()] == [
        ["run", "seed", "status", "steps", "first", "accuracy", "last", "best", "time"],
        ["one", "1", "failed", "1", "—", "50.0%", "—", "—"],
        ["two", "2", "failed", "1", "—", "75.0%", "—", "—"],
        [],
        ["report:", str((folder / "report.html").relative_to(tmp_path))],
        ["tables:", str((folder / "runs.csv").relative_to(tmp_path))],
    ]
    assert (folder / "runs.csv").read_text().splitlines()[0].startswith("folder,seed,status")
    assert {name: value for name, value in content(tmp_path).items() if not name.startswith("outputs")} == before


def test_a_folder_of_links_is_compared_and_each_run_counts_once(tmp_path: Path) -> None:
    one, two = a_run(tmp_path / "one", "seed=1"), a_run(tmp_path / "two", "seed=2")
    links = tmp_path / "links"
    links.mkdir()
    for index, run in enumerate((one, two, one)):
        (links / f"link{index}").symlink_to(run)
    (links / "loop").symlink_to(links)
    assert find_runs(links) == [links / "link0", links / "link1"]

    report.run(comparing(links, two), tmp_path / "out")
    rows = (tmp_path / "out" / "runs.csv").read_text().splitlines()[1:]
    assert [row.split(",")[1] for row in rows] == ["1", "2"]


def test_a_folder_without_runs_is_not_compared_and_no_run_gets_the_report(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    before = content(tmp_path)
    with refused("tracking.compare", tmp_path / "empty"):
        report.run(comparing(run, tmp_path / "empty"), tmp_path / "out")
    with refused("hydra.run.dir", run):
        report.run(comparing(run), run)
    assert content(tmp_path) == before

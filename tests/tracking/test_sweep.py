"""The tables at a sweep's end."""

import csv
import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from app.config import RunConfig
from app.tracking.report.sweep import end_sweep, table


def a_job(folder: Path, overrides: list[str], **summary: Any) -> None:
    config = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.from_dotlist(overrides))
    (folder / "config").mkdir(parents=True)
    OmegaConf.save(config, folder / "config" / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), folder / "config" / "overrides.yaml")
    (folder / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    accuracies = {f"eval/accuracy_{each}": summary.pop(each) for each in ("first", "last", "best") if each in summary}
    content = {"status": "finished", "steps": 5, **accuracies, "total/seconds": 60.0, **summary}
    (folder / "summary.json").write_text(json.dumps(content))


def test_the_best_run_comes_first_and_failed_runs_show_their_error(tmp_path: Path) -> None:
    given = ["steps=60"]
    a_job(tmp_path / "0-a", [*given, "trainer.lr=0.1"], steps=60, first=0.285, last=0.9, best=0.91)
    a_job(tmp_path / "1-b", [*given, "trainer.lr=0.2"], steps=60, first=0.285, last=0.98, best=0.98)
    a_job(tmp_path / "2-c", [*given, "trainer.lr=0.3"], status="failed", steps=3, error="RunError: no way\nmore")
    (tmp_path / "3-refused").mkdir()
    (tmp_path / ".submitit").mkdir()
    assert table(tmp_path).splitlines() == [
        str(tmp_path),
        "run  lr   status       steps  accuracy       best   time",
        "1    0.2  finished     60     28.5% → 98.0%  98.0%  1 min 00 s",
        "0    0.1  finished     60     28.5% → 90.0%  91.0%  1 min 00 s",
        "2    0.3  failed       3      — → —          —      1 min 00 s",
        "3         not started",
        "2: RunError: no way",
    ]


def seeds(folder: Path) -> None:
    for job, (lr, seed, last) in enumerate(((0.1, 0, 0.7), (0.1, 1, 0.5), (0.2, 0, 0.9), (0.2, 1, 0.9))):
        overrides = [f"trainer.lr={lr}", f"seed={seed}", "steps=5", "eval.every=0"]
        a_job(folder / f"{job}-x", overrides, first=0.25, last=last, best=last)


def test_a_sweep_over_seeds_shows_them_and_the_mean_of_each_setting(tmp_path: Path) -> None:
    seeds(tmp_path)
    assert table(tmp_path).splitlines()[1:] == [
        "run  lr   seed  status    steps  accuracy       best   time",
        "2    0.2  0     finished  5      25.0% → 90.0%  90.0%  1 min 00 s",
        "3    0.2  1     finished  5      25.0% → 90.0%  90.0%  1 min 00 s",
        "0    0.1  0     finished  5      25.0% → 70.0%  70.0%  1 min 00 s",
        "1    0.1  1     finished  5      25.0% → 50.0%  50.0%  1 min 00 s",
        "",
        "mean ± standard deviation over the seeds of finished runs",
        "lr   seeds  first accuracy  last           best           time",
        "0.2  2      25.0% ± 0.0%    90.0% ± 0.0%   90.0% ± 0.0%   1 min 00 s ± 0 s",
        "0.1  2      25.0% ± 0.0%    60.0% ± 14.1%  60.0% ± 14.1%  1 min 00 s ± 0 s",
    ]


def test_a_sweep_ends_with_a_report_and_csv_files_in_its_folder(tmp_path: Path) -> None:
    seeds(tmp_path)
    assert end_sweep(tmp_path)[1:] == [f"report: {tmp_path / 'report.html'}", f"tables: {tmp_path / 'runs.csv'}"]
    assert "<h1>4 runs side by side</h1>" in (tmp_path / "report.html").read_text()

    with (tmp_path / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [(run["trainer.lr"], run["seed"], run["eval/accuracy_last"]) for run in runs] == [
        ("0.1", "0", "0.7"),
        ("0.1", "1", "0.5"),
        ("0.2", "0", "0.9"),
        ("0.2", "1", "0.9"),
    ]
    with (tmp_path / "seeds.csv").open() as file:
        means = list(csv.DictReader(file))
    assert [(row["trainer.lr"], row["runs"], row["total/seconds/mean"]) for row in means] == [
        ("0.1", "2", "60.0"),
        ("0.2", "2", "60.0"),
    ]
    assert float(means[0]["eval/accuracy_last/mean"]) == 0.6
    assert abs(float(means[0]["eval/accuracy_last/std"]) - 0.02**0.5) < 1e-12


def test_a_sweep_of_one_seed_has_no_table_of_means(tmp_path: Path) -> None:
    for job in (0, 1):
        a_job(tmp_path / f"{job}-x", [f"trainer.lr={job + 1}"], last=0.5, best=0.5)
    end_sweep(tmp_path)
    assert "standard deviation" not in table(tmp_path)
    assert not (tmp_path / "seeds.csv").exists()

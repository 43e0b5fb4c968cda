"""What tells runs apart, and the tables at the end of a sweep and of `mode=report`."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.config import RunConfig
from app.mode.report import end_sweep
from app.tracking.report.comparison import compare, run_table, spread
from app.tracking.report.data import RunData


def a_run(name: str, config: dict[str, Any], *overrides: str, **summary: Any) -> RunData:
    return RunData(Path(name), summary, [], config, list(overrides), [], [])


def test_means_cover_the_finished_runs_of_a_setting_and_the_best_comes_first() -> None:
    runs = [
        a_run(f"{lr}{seed}", {"seed": seed, "lr": lr}, status=status, **{"eval/accuracy_best": accuracy})
        for lr, seed, status, accuracy in (
            (2, 0, "finished", 0.5),
            (1, 0, "finished", 0.6),
            (1, 1, "finished", 0.8),
            (1, 2, "failed", 0.0),
        )
    ]
    groups = compare(runs).seed_groups()
    assert [(values, len(finished)) for values, finished in groups.items()] == [(("1",), 2), (("2",), 1)]
    assert spread(groups[("1",)], "eval/accuracy_best") == (pytest.approx(0.7), pytest.approx(0.02**0.5))
    assert spread(groups[("2",)], "eval/accuracy_best") == (0.5, None)
    assert spread(groups[("1",)], "total/seconds") == (None, None)
    one_each = [a_run(str(seed), {"seed": seed, "lr": seed}, status="finished") for seed in (0, 1)]
    assert compare(one_each).seed_groups() == {}


def test_the_tables_say_how_little_a_few_prompts_tell_and_of_which_step_they_are() -> None:
    evaluated = {"eval/accuracy_best": 0.9, "steps": 4}
    comparison = compare([a_run(str(n), {"steps": n}, f"steps={n}", **evaluated, attempts=n) for n in (1, 2)])
    for run, error in zip(comparison.runs, (0.04, 0.126), strict=True):
        run.rows.append({"eval/accuracy_stderr": error})
    assert run_table(comparison).text[0][:4] == ["run", "steps", "status", "last step"]
    assert run_table(comparison).numbers[0][:4] == ["folder", "steps", "status", "last_step"]
    assert comparison.notes == [
        "The accuracies have standard errors of up to 12.6 points: more prompts tell more.",
        "The time of 1 run is that of several attempts.",
    ]
    comparison.runs[1].rows.clear()
    assert len(comparison.notes) == 1


def test_a_sweep_over_seeds_ends_with_means_on_the_screen_in_the_report_and_in_csv_files(tmp_path: Path) -> None:
    for job, (lr, seed, last) in enumerate(((0.1, 0, 0.7), (0.1, 1, 0.5), (0.2, 0, 0.9), (0.2, 1, 0.9))):
        folder = tmp_path / f"{job}-x"
        overrides = [f"trainer.lr={lr}", f"seed={seed}", "steps=5", "eval.every=0"]
        config = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.from_dotlist(overrides))
        (folder / "config").mkdir(parents=True)
        OmegaConf.save(config, folder / "config" / "config.yaml")
        OmegaConf.save(OmegaConf.create(overrides), folder / "config" / "overrides.yaml")
        (folder / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
        accuracies = {"eval/accuracy_first": 0.25, "eval/accuracy_last": last, "eval/accuracy_best": last}
        summary = {"status": "finished", "steps": 5, **accuracies, "total/seconds": 60.0}
        (folder / "summary.json").write_text(json.dumps(summary))
    seeds = ["25.0% ± 0.0%", "60.0% ± 14.1%", "60.0% ± 14.1%", "1 min 00 s ± 0 s"]
    assert end_sweep(tmp_path)[0][10].split() == ["0.1", "2", *" ".join(seeds).split()]
    assert "".join(f"<td>{cell}</td>" for cell in ("0.1", "2", *seeds)) in (tmp_path / "report.html").read_text()

    with (tmp_path / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [(run["trainer.lr"], run["seed"], run["eval/accuracy_last"]) for run in runs] == [
        ("0.2", "0", "0.9"),
        ("0.2", "1", "0.9"),
        ("0.1", "0", "0.7"),
        ("0.1", "1", "0.5"),
    ]
    with (tmp_path / "seeds.csv").open() as file:
        mean = list(csv.DictReader(file))[1]
    assert (mean["trainer.lr"], mean["runs"], mean["total/seconds/mean"]) == ("0.1", "2", "60.0")
    assert float(mean["eval/accuracy_last/mean"]) == 0.6
    assert float(mean["eval/accuracy_last/std"]) == pytest.approx(0.02**0.5)

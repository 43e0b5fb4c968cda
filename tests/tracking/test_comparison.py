"""What tells runs apart, and the tables at the end of a sweep and of `mode=report`."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.config import RunConfig
from app.mode.report import end_sweep
from app.tracking.report.comparison import OTHER_ROWS, compare, run_table, screen, spread
from app.tracking.report.data import RunData


def a_run(name: str, config: dict[str, Any], *overrides: str, **summary: Any) -> RunData:
    return RunData(Path(name), summary, [], [], {}, config, list(overrides), [], [])


def test_runs_are_named_by_what_varies_and_was_given_the_seed_last() -> None:
    runs = [
        a_run(
            f"{lr}{seed}", {"seed": seed, "trainer.lr": lr, "steps": 5}, f"trainer.lr={lr}", f"seed={seed}", "steps=5"
        )
        for lr in (0.1, 0.2)
        for seed in (0, 1)
    ]
    made = compare(runs)
    assert made.keys == ["trainer.lr", "seed"]
    assert made.labels == ["lr", "seed"]
    assert made.names == ["lr=0.1, seed=0", "lr=0.1, seed=1", "lr=0.2, seed=0", "lr=0.2, seed=1"]


@pytest.mark.parametrize(
    ("one", "other", "given", "keys"),
    [
        # A preset's name, and not what it brings along.
        ({"data.name": "a", "data.path": "b"}, {"data.name": "c", "data.path": "d"}, ["data=x"], ["data.name"]),
        # Everything that was given.
        ({"trainer.lr": 0.4, "trainer.x": 4}, {"trainer.lr": 0.8, "trainer.x": 8}, ["trainer.lr=0"], ["trainer.lr"]),
        # Where records go and servers listen changes no result.
        ({"seed": 1, "tracking.run_name": "a", "rollout.port": 1}, {"seed": 2, "rollout.port": 2}, [], ["seed"]),
        # The checkpoint tells evaluations apart, and not training runs.
        ({"resume": "a", "mode": "train"}, {"resume": "b", "mode": "train"}, [], []),
        ({"resume": "a", "mode": "eval"}, {"resume": "b", "mode": "eval"}, [], ["resume"]),
    ],
)
def test_what_tells_runs_apart(one: dict[str, Any], other: dict[str, Any], given: list[str], keys: list[str]) -> None:
    assert compare([a_run("one", one, *given), a_run("other", other, *given)]).keys == keys


def test_equal_runs_and_runs_without_a_configuration_have_their_folders_names() -> None:
    made = compare([a_run("a/one", {"seed": 1}), a_run("a/two", {"seed": 1}), a_run("a/old", {})])
    assert (made.keys, made.names) == ([], ["one", "two", "old"])
    made = compare([a_run("one", {"seed": 1}), a_run("two", {"seed": 1}), a_run("three", {"seed": 2})])
    assert made.names == ["seed=1 (one)", "seed=1 (two)", "seed=2"]


def test_runs_that_differ_in_many_settings_are_named_by_their_folders() -> None:
    keys = [f"trainer.k{number}" for number in range(7)]
    runs = [
        a_run(name, dict.fromkeys(keys, value), *(f"{key}={value}" for key in keys), status="finished")
        for value, name in enumerate(("one", "two"))
    ]
    made = compare(runs)
    assert made.names == ["one", "two"]
    assert [row[:2] for row in run_table(made).text] == [["run", "status"], ["one", "finished"], ["two", "finished"]]
    assert run_table(made).numbers[0][1:8] == keys


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ({"data.name": "rows", "data.path": "a"}, {"data.name": "rows", "data.path": "a"}, False),
        ({"data.name": "rows", "data.path": "a"}, {"data.name": "rows", "data.path": "b"}, True),
        ({"data.path": "a", "data.eval_path": "e"}, {"data.path": "b", "data.eval_path": "e"}, False),
        ({"data.eval_sets.t.path": "e"}, {"data.eval_sets.t.path": "f"}, True),
        ({"data.prefix": "a"}, {"data.prefix": "b"}, False),
        ({"data.name": "arithmetic", "data.arithmetic.eval_problems": 9}, {"data.name": "arithmetic"}, True),
    ],
)
def test_a_comparison_of_runs_that_were_evaluated_on_other_rows_has_a_note(
    one: dict[str, Any], other: dict[str, Any], differ: bool
) -> None:
    best = {"eval/accuracy_best": 0.5, "eval/prompts": 9}
    made = compare([a_run("a", one, **best), a_run("b", other, **best)])
    assert made.notes == ([OTHER_ROWS] if differ else [])
    assert (OTHER_ROWS in screen(made)) == differ
    assert compare([a_run("a", {}, **best), a_run("b", {}, **{**best, "eval/prompts": 16})]).notes == [OTHER_ROWS]


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


def a_job(folder: Path, overrides: list[str], **summary: Any) -> None:
    config = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.from_dotlist(overrides))
    (folder / "config").mkdir(parents=True)
    OmegaConf.save(config, folder / "config" / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), folder / "config" / "overrides.yaml")
    (folder / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    accuracies = {f"eval/accuracy_{each}": summary.pop(each) for each in ("first", "last", "best") if each in summary}
    content = {"status": "finished", "steps": 5, **accuracies, "total/seconds": 60.0, **summary}
    (folder / "summary.json").write_text(json.dumps(content))


def test_a_sweep_ends_with_its_runs_the_best_first_and_the_errors_of_failed_ones(tmp_path: Path) -> None:
    given = ["steps=60"]
    a_job(tmp_path / "0-a", [*given, "trainer.lr=0.1"], steps=60, first=0.285, last=0.9, best=0.91)
    a_job(tmp_path / "1-b", [*given, "trainer.lr=0.2"], steps=60, first=0.285, last=0.98, best=0.98)
    a_job(tmp_path / "2-c", [*given, "trainer.lr=0.3"], status="failed", steps=3, error="RunError: no way\nmore")
    (tmp_path / "3-refused").mkdir()
    (tmp_path / ".submitit").mkdir()
    lines = end_sweep(tmp_path)
    assert [line.split() for line in lines[2:6]] == [
        ["1", "0.2", "finished", "60", "28.5%", "98.0%", "98.0%", "1", "min", "00", "s"],
        ["0", "0.1", "finished", "60", "28.5%", "90.0%", "91.0%", "1", "min", "00", "s"],
        ["2", "0.3", "failed", "3", "—", "—", "—", "1", "min", "00", "s"],
        ["3", "not", "started", "—", "—", "—", "—"],
    ]
    assert "2: RunError: no way" in lines
    assert lines[-2:] == [f"report: {tmp_path / 'report.html'}", f"tables: {tmp_path / 'runs.csv'}"]
    assert not (tmp_path / "seeds.csv").exists()
    assert end_sweep(tmp_path / "3-refused") == []


def test_a_sweep_over_seeds_ends_with_means_on_the_screen_in_the_report_and_in_csv_files(tmp_path: Path) -> None:
    for job, (lr, seed, last) in enumerate(((0.1, 0, 0.7), (0.1, 1, 0.5), (0.2, 0, 0.9), (0.2, 1, 0.9))):
        overrides = [f"trainer.lr={lr}", f"seed={seed}", "steps=5", "eval.every=0"]
        a_job(tmp_path / f"{job}-x", overrides, first=0.25, last=last, best=last)
    seeds = ["25.0% ± 0.0%", "60.0% ± 14.1%", "60.0% ± 14.1%", "1 min 00 s ± 0 s"]
    assert end_sweep(tmp_path)[10].split() == ["0.1", "2", *" ".join(seeds).split()]
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

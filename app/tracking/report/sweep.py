"""The results of several runs as a table for the screen and as CSV files; a sweep ends with them.

`runs.csv` has a row for each run. `seeds.csv` has a row for each setting: mean and sample standard deviation over the
seeds of its finished runs.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from app.tracking.number_format import aligned, duration
from app.tracking.report.comparison import NUMBERS, SEED_COLUMNS, Comparison, SeedGroup, compare, percent, values_of
from app.tracking.report.data import MISSING, RunData, find_runs, read_run
from app.tracking.report.page import NAME, write_report
from app.utils.files import replace_file

RUNS = "runs.csv"
SEEDS = "seeds.csv"
OUTCOME = ("status", "steps", "accuracy", "best", "time")


def table(folder: Path) -> str:
    """Format the runs of a sweep's folder, best first, then means over seeds, then the errors of failed runs.

    Folders without a summary are listed as not started.
    """
    entries = folder.iterdir() if folder.is_dir() else ()
    # Launchers keep files in hidden folders.
    folders = sorted(path for path in entries if path.is_dir() and not path.name.startswith("."))
    comparison = compare([read_run(path) for path in folders])

    names = _short_names([run.folder for run in comparison.runs])
    ranked = sorted(zip(names, comparison.runs, strict=True), key=lambda named: -_best(named[1]))
    rows = [[name, *_values(run, comparison), *_outcome(run)] for name, run in ranked]
    lines = aligned([["run", *comparison.labels, *OUTCOME], *rows])

    groups = sorted(comparison.seed_groups(), key=lambda group: -_mean_best(group))
    if groups:
        lines += ["", "mean ± standard deviation over the seeds of finished runs", *_seed_lines(groups, comparison)]

    failed = [(name, str(run.summary["error"])) for name, run in ranked if "error" in run.summary]
    return "\n".join([str(folder), *lines, *(f"{name}: {error}".splitlines()[0] for name, error in failed)])


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Write `report.html`, `runs.csv` and, if a setting ran with several seeds, `seeds.csv` into the folder `out`.

    Returns:
        The report.
    """
    report = write_report(folders, out / NAME)
    comparison = compare([read_run(folder) for folder in folders])
    replace_file(out / RUNS, _csv(_run_rows(comparison)))

    groups = comparison.seed_groups()
    if groups:
        replace_file(out / SEEDS, _csv(_seed_rows(groups, comparison)))
    return report


def end_sweep(folder: Path) -> list[str]:
    """Write the comparison of a sweep's runs into its folder; return the lines that name the files."""
    runs = find_runs(folder)
    if not runs or runs == [folder]:
        return []

    report = write_comparison(runs, folder)
    return ["", f"report: {report}", f"tables: {folder / RUNS}"]


def _run_rows(comparison: Comparison) -> list[list[object]]:
    head: list[object] = ["folder", *comparison.keys, "status", "steps", *NUMBERS]
    rows: list[list[object]] = [
        [
            run.folder,
            *_values(run, comparison),
            *(run.summary.get(name, "") for name in ("status", "steps", *NUMBERS)),
        ]
        for run in comparison.runs
    ]
    return [head, *rows]


def _seed_rows(groups: Sequence[SeedGroup], comparison: Comparison) -> list[list[object]]:
    columns = [f"{name}/{part}" for name in NUMBERS for part in ("mean", "std")]
    rows: list[list[object]] = [[*comparison.settings, "runs", *columns]]
    for group in groups:
        row: list[object] = [*group.values, len(group.runs)]
        for name in NUMBERS:
            spread = group.spread(name)
            row += ["", ""] if spread is None else [spread.mean, spread.deviation]
        rows.append(row)
    return rows


def _seed_lines(groups: Sequence[SeedGroup], comparison: Comparison) -> list[str]:
    settings = comparison.labels[: len(comparison.settings)]
    return aligned([[*settings, *SEED_COLUMNS], *(group.cells for group in groups)])


def _values(run: RunData, comparison: Comparison) -> list[str]:
    return list(values_of(run, comparison.keys)) if run.config else [""] * len(comparison.keys)


def _outcome(run: RunData) -> list[str]:
    """Return the cells of `OUTCOME`."""
    if not run.summary:
        return ["not started", "", "", "", ""]

    first, last, best = (_accuracy(run, which) for which in ("first", "last", "best"))
    steps = run.summary.get("steps", 0)
    accuracy = f"{first} → {last}" if steps else last
    return [str(run.summary.get("status")), str(steps), accuracy, best, duration(run.summary.get("total/seconds", 0.0))]


def _accuracy(run: RunData, which: str) -> str:
    value = run.summary.get(f"eval/accuracy_{which}")
    return MISSING if value is None else percent(value)


def _best(run: RunData) -> float:
    return float(run.summary.get("eval/accuracy_best", -1.0))


def _mean_best(group: SeedGroup) -> float:
    spread = group.spread("eval/accuracy_best")
    return -1.0 if spread is None else spread.mean


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Return the job numbers, which the folders of a sweep begin with; the whole names if there are none."""
    numbers = [match.group() for folder in folders if (match := re.match(r"\d+(?=-|$)", folder.name))]
    unique = len(numbers) == len(folders) == len(set(numbers))
    return numbers if unique else [folder.name for folder in folders]


def _csv(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()

"""The tables of a comparison, for the screen, the report and CSV files: a row for each run, and for each setting."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.tracking.number_format import aligned, duration, measured, percent
from app.tracking.report.comparison import Comparison, folder_names, spread, values_of
from app.tracking.report.data import RunData

SEED_TITLE = "mean ± standard deviation over the seeds of finished runs"
# Of `summary.json`, with a title and a format.
RESULTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("eval/accuracy_first", "first accuracy", percent),
    ("eval/accuracy_last", "last", percent),
    ("eval/accuracy_best", "best", percent),
    ("total/seconds", "time", duration),
)
NAMES = [name for name, _, _ in RESULTS]
TITLES = [title for _, title, _ in RESULTS]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text for people, and of numbers for a CSV file. The first row is the head."""

    text: list[list[str]]
    numbers: list[list[object]]

    @property
    def csv(self) -> str:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(self.numbers)
        return file.getvalue()


def run_table(comparison: Comparison) -> Table:
    """Return a row for each run."""
    text = [["run", *comparison.labels, "status", "steps", *TITLES]]
    numbers: list[list[object]] = [["folder", *comparison.keys, "status", "steps", *NAMES]]
    for run, name in zip(comparison.runs, short_names(comparison.runs), strict=True):
        values = values_of(run, comparison.keys) if run.config else [""] * len(comparison.keys)
        status, steps = str(run.summary.get("status", "not started")), run.summary.get("steps", "")
        results = [measured(run.summary.get(key), form) for key, _, form in RESULTS]
        text.append([name, *values, status, str(steps), *results])
        numbers.append([run.folder, *values, status, steps, *(run.summary.get(key, "") for key in NAMES)])
    return Table(text, numbers)


def seed_table(comparison: Comparison) -> Table | None:
    """Return a row for each setting; None unless a setting ran with several seeds."""
    groups = comparison.seed_groups()
    if not groups:
        return None

    settings = comparison.labels[: len(comparison.settings)]
    text = [[*settings, "seeds", *TITLES]]
    numbers: list[list[object]] = [
        [*comparison.settings, "runs", *(f"{name}/{part}" for name in NAMES for part in ("mean", "std"))]
    ]
    for values, runs in groups.items():
        spreads = [spread(runs, name) for name in NAMES]
        results = [
            measured(mean, form) if deviation is None else f"{measured(mean, form)} ± {form(deviation)}"
            for (mean, deviation), (_, _, form) in zip(spreads, RESULTS, strict=True)
        ]
        text.append([*values, str(len(runs)), *results])
        numbers.append([*values, len(runs), *(number for pair in spreads for number in pair)])
    return Table(text, numbers)


def screen(comparison: Comparison) -> list[str]:
    """Return the tables as lines, and the errors of failed runs."""
    lines = aligned(run_table(comparison).text)
    if seeds := seed_table(comparison):
        lines += ["", SEED_TITLE, *aligned(seeds.text)]

    named = zip(short_names(comparison.runs), comparison.runs, strict=True)
    failed = [f"{name}: {run.summary['error']}" for name, run in named if "error" in run.summary]
    return [*lines, *(line.splitlines()[0] for line in failed)]


def short_names(runs: Sequence[RunData]) -> list[str]:
    """Return the job numbers, which the folders of a sweep begin with; the folders' names if there are none."""
    numbers = [match.group() for run in runs if (match := re.match(r"\d+(?=-|$)", run.folder.name))]
    unique = len(numbers) == len(runs) == len(set(numbers))
    return numbers if unique else folder_names(runs)

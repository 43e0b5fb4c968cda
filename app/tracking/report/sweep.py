"""The end of a sweep: a line for each of its runs, the best first, and what became of those that failed."""

from collections.abc import Mapping
from pathlib import Path

from app.tracking.number_format import duration
from app.tracking.run_folder import summary

COLUMNS = ("run", "status", "steps", "accuracy", "best", "time")


def table(folder: Path) -> str:
    """The runs below a sweep's folder, from their `summary.json`; those that never began have none and are named."""
    entries = folder.iterdir() if folder.is_dir() else ()
    runs = sorted(path for path in entries if path.is_dir() and not path.name.startswith("."))  # launchers keep theirs
    found = sorted(((run.name, summary.read(run)) for run in runs), key=lambda each: -_best(each[1]))
    rows = [COLUMNS, *(_row(name, values) for name, values in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    errors = [f"{name}: {values['error']}".splitlines()[0] for name, values in found if "error" in values]
    return "\n".join([str(folder), *lines, *errors])


def _best(values: Mapping[str, object]) -> float:
    best = values.get("eval/accuracy_best")
    return float(best) if isinstance(best, (int, float)) else -1.0


def _row(name: str, values: Mapping[str, object]) -> tuple[str, ...]:
    if not values:
        return name, "did not begin", "", "", "", ""
    seconds = values.get("total/seconds")
    accuracy = f"{_percent(values, 'first')} → {_percent(values, 'last')}"
    time = duration(seconds) if isinstance(seconds, (int, float)) else ""
    return name, str(values.get("status")), str(values.get("steps", 0)), accuracy, _percent(values, "best"), time


def _percent(values: Mapping[str, object], which: str) -> str:
    value = values.get(f"eval/accuracy_{which}")
    return f"{value:.1%}" if isinstance(value, (int, float)) else "–"

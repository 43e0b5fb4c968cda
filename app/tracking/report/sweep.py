"""The table at the end of a sweep: one line for each run, best first, then the errors of failed runs."""

from collections.abc import Mapping
from pathlib import Path

from app.tracking.number_format import duration
from app.tracking.run_folder import summary

COLUMNS = ("run", "status", "steps", "accuracy", "best", "time")


def table(folder: Path) -> str:
    """Format the runs of a sweep's folder from each `summary.json`. Runs without one are listed as not started."""
    entries = folder.iterdir() if folder.is_dir() else ()
    # Launchers keep files in hidden folders.
    runs = sorted(path for path in entries if path.is_dir() and not path.name.startswith("."))
    summaries = {run.name: summary.read(run) for run in runs}
    ranked = sorted(summaries, key=lambda name: -_best(summaries[name]))

    rows = [COLUMNS, *(_row(name, summaries[name]) for name in ranked)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    failed = [name for name in ranked if "error" in summaries[name]]
    errors = [f"{name}: {summaries[name]['error']}".splitlines()[0] for name in failed]
    return "\n".join([str(folder), *lines, *errors])


def _best(values: Mapping[str, object]) -> float:
    best = values.get("eval/accuracy_best")
    return float(best) if isinstance(best, (int, float)) else -1.0


def _row(name: str, values: Mapping[str, object]) -> tuple[str, ...]:
    if not values:
        return name, "not started", "", "", "", ""

    status = str(values.get("status"))
    accuracy = f"{_percent(values, 'first')} → {_percent(values, 'last')}"
    seconds = values.get("total/seconds")
    time = duration(seconds) if isinstance(seconds, (int, float)) else ""
    return name, status, str(values.get("steps", 0)), accuracy, _percent(values, "best"), time


def _percent(values: Mapping[str, object], which: str) -> str:
    value = values.get(f"eval/accuracy_{which}")
    return f"{value:.1%}" if isinstance(value, (int, float)) else "–"

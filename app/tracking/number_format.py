"""Numbers and tables formatted for people."""

from collections.abc import Callable, Mapping, Sequence

MISSING = "—"
percent = "{:.1%}".format
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """Format a count with three digits and a unit.

    >>> count(0.4), count(17), count(999.6), count(1234.5), count(45_600_000)
    ('0', '17', '1.00k', '1.23k', '45.6M')
    """
    for size, unit in UNITS:
        if abs(value) >= size * 0.9995:
            scaled = value / size
            decimals = max(0, 3 - len(str(int(abs(scaled)))))
            return f"{scaled:.{decimals}f}{unit}"
    return f"{value:.0f}"


def seconds(value: float) -> str:
    """Format the duration of a step or phase.

    >>> seconds(0.0123), seconds(1.234), seconds(75.2), seconds(4000)
    ('0.01 s', '1.23 s', '75.2 s', '4000 s')
    """
    if value < 10:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 1000 else f"{value:.0f} s"


def duration(value: float) -> str:
    """Format the duration of a run.

    >>> duration(42.4), duration(102), duration(7384), duration(600_000)
    ('42 s', '1 min 42 s', '2 h 03 min', '6 d 22 h')
    """
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 2 * 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def measured(value: float | None, form: Callable[[float], str]) -> str:
    """Format a number that may not have been measured."""
    return MISSING if value is None else form(value)


def plural(number: int, noun: str, many: str | None = None) -> str:
    """Format a count with its noun.

    >>> plural(1, "step"), plural(2, "step"), plural(2, "process", "processes")
    ('1 step', '2 steps', '2 processes')
    """
    return f"{number} {noun if number == 1 else many or f'{noun}s'}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def set_metrics(row: Mapping[str, float | None]) -> dict[str, dict[str, float]]:
    """Return the metrics of each evaluation set in a line of `metrics.jsonl`.

    >>> set_metrics({"step": 3, "eval/accuracy": 0.5, "eval/easy/accuracy": 0.7, "eval/hard/accuracy": 0.3})
    {'easy': {'accuracy': 0.7}, 'hard': {'accuracy': 0.3}}
    """
    sets: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        if key.startswith("eval/") and value is not None:
            name, _, metric = key.removeprefix("eval/").rpartition("/")
            sets.setdefault(name, {})[metric] = value

    if len(sets) > 1:
        sets.pop("", None)  # the mean over the sets
    return {name or "eval": metrics for name, metrics in sets.items()}


def evaluation_rows(results: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return the head and a row for each evaluation set. The ± of an accuracy is its standard error.

    set         prompts  accuracy       pass@2  pass@4  tokens  truncated
    arithmetic  200      34.5% ± 3.4%   41.0%   47.5%   5.2     0.0%
    """
    passes = sorted(
        {name for metrics in results.values() for name in metrics if name.startswith("pass@")},
        key=lambda name: int(name.removeprefix("pass@")),
    )
    rows = [["set", "prompts", "accuracy", *passes, "tokens", "truncated"]]
    for name, metrics in results.items():
        error = f" ± {percent(metrics['accuracy_stderr'])}" if "accuracy_stderr" in metrics else ""
        prompts = measured(metrics.get("prompts"), "{:.0f}".format)
        length = measured(metrics.get("length_mean"), "{:.1f}".format)
        accuracy, *fractions = (measured(metrics.get(each), percent) for each in ("accuracy", *passes))
        truncated = measured(metrics.get("truncated_fraction"), percent)
        rows.append([name, prompts, accuracy + error, *fractions, length, truncated])
    return rows

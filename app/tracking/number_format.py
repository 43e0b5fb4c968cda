"""Numbers and tables formatted for people."""

from collections.abc import Callable, Sequence

MISSING = "—"
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

    >>> duration(42.4), duration(102), duration(7384)
    ('42 s', '1 min 42 s', '2 h 03 min')
    """
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def percent(value: float) -> str:
    """Format a fraction.

    >>> percent(0.123)
    '12.3%'
    """
    return f"{value:.1%}"


def measured(value: float | None, form: Callable[[float], str]) -> str:
    """Format a number that may not have been measured.

    >>> measured(0.5, percent), measured(None, percent)
    ('50.0%', '—')
    """
    return MISSING if value is None else form(value)


def plural(number: int, noun: str, many: str | None = None) -> str:
    """Format a number of things.

    >>> plural(1, "step"), plural(2, "step"), plural(2, "process", "processes")
    ('1 step', '2 steps', '2 processes')
    """
    return f"{number} {noun if number == 1 else many or f'{noun}s'}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns.

    >>> aligned([["run", "best"], ["0", "98.0%"]])
    ['run  best', '0    98.0%']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

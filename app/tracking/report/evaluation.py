"""The table of an evaluation: a row for each evaluation set.

set         prompts  accuracy       pass@2  pass@4  tokens  truncated
arithmetic  200      34.5% ± 3.4%   41.0%   47.5%   5.2     0.0%
"""

from collections.abc import Mapping

from app.tracking.report.comparison import percent
from app.tracking.report.data import MISSING

PREFIX = "eval/"
ONLY = "eval"  # the name of a single set, whose metrics have none


def set_metrics(row: Mapping[str, float | None]) -> dict[str, dict[str, float]]:
    """Return the metrics of each evaluation set in a line of `metrics.jsonl`.

    >>> set_metrics({"step": 3, "eval/accuracy": 0.5, "eval/easy/accuracy": 0.7, "eval/hard/accuracy": 0.3})
    {'easy': {'accuracy': 0.7}, 'hard': {'accuracy': 0.3}}
    >>> set_metrics({"step": 3, "eval/accuracy": 0.5})
    {'eval': {'accuracy': 0.5}}
    """
    sets: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        if key.startswith(PREFIX) and value is not None:
            name, _, metric = key.removeprefix(PREFIX).rpartition("/")
            sets.setdefault(name, {})[metric] = value

    if len(sets) > 1:
        sets.pop("", None)  # the mean over the sets
    return {name or ONLY: metrics for name, metrics in sets.items()}


def evaluation_rows(results: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return the head and a row for each set. The ± of an accuracy is its standard error."""
    passes = sorted({name for metrics in results.values() for name in metrics if name.startswith("pass@")}, key=_k)
    rows = [["set", "prompts", "accuracy", *passes, "tokens", "truncated"]]
    for name, metrics in results.items():
        rows.append(
            [
                name,
                _form(metrics.get("prompts"), "{:.0f}"),
                _accuracy(metrics),
                *(_form(metrics.get(each), "{:.1%}") for each in passes),
                _form(metrics.get("length_mean"), "{:.1f}"),
                _form(metrics.get("truncated_fraction"), "{:.1%}"),
            ]
        )
    return rows


def _accuracy(metrics: Mapping[str, float]) -> str:
    shown = _form(metrics.get("accuracy"), "{:.1%}")
    error = metrics.get("accuracy_stderr")
    return shown if error is None else f"{shown} ± {percent(error)}"


def _k(name: str) -> int:
    return int(name.removeprefix("pass@"))


def _form(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)

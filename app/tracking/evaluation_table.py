"""The table of an evaluation: a row for each evaluation set.

set         prompts  accuracy       pass@2  pass@4  tokens  truncated
arithmetic  200      34.5% ± 3.4%   41.0%   47.5%   5.2     0.0%
"""

from collections.abc import Mapping

from app.tracking.number_format import measured, percent

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
        accuracy = measured(metrics.get("accuracy"), percent)
        if "accuracy_stderr" in metrics:
            accuracy += f" ± {percent(metrics['accuracy_stderr'])}"
        rows.append(
            [
                name,
                measured(metrics.get("prompts"), "{:.0f}".format),
                accuracy,
                *(measured(metrics.get(each), percent) for each in passes),
                measured(metrics.get("length_mean"), "{:.1f}".format),
                measured(metrics.get("truncated_fraction"), percent),
            ]
        )
    return rows


def _k(name: str) -> int:
    return int(name.removeprefix("pass@"))

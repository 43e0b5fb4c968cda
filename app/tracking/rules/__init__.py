"""A rule on one metric of a run, and the steps that it looks back on. `app.tracking.rules.table` lists the rules."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

WINDOW = 30  # steps


class History:
    """The most recent steps of a run.

    Example:
        history = History(max_staleness=0)
        history.add({"entropy": 1.2})
        history.add({"entropy": 1.1})
        history.last("entropy", 2)  # [1.2, 1.1]
        history.before("entropy")  # [1.2]
    """

    def __init__(self, *, max_staleness: float = 0) -> None:
        self.max_staleness = max_staleness
        self.initial_entropy: list[float] = []
        self._steps: list[Mapping[str, float]] = []  # oldest first

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Append the metrics of the next step. None is what `metrics.jsonl` holds for NaN and infinity."""
        values = {name: math.nan if value is None else value for name, value in metrics.items()}
        self._steps = [*self._steps, values][-WINDOW:]

        entropy = values.get("entropy", math.nan)
        if math.isfinite(entropy) and len(self.initial_entropy) < 5:
            self.initial_entropy.append(entropy)

    def last(self, name: str, count: int = 1) -> list[float]:
        """Return a metric's values in the last `count` steps, or an empty list unless all of them have it."""
        values = [step[name] for step in self._steps[-count:] if name in step]
        return values if len(values) == count else []

    def before(self, name: str, skip: int = 1) -> list[float]:
        """Return a metric's finite values in the steps before the last `skip`."""
        return [step[name] for step in self._steps[:-skip] if math.isfinite(step.get(name, math.nan))]

    @property
    def stale(self) -> bool:
        """Whether the last step trained on trajectories of an older policy."""
        return max(self.last("staleness/max"), default=0.0) > 0


Problem = Callable[[History, str], str | None]  # history, metric name → one sentence about the last step


@dataclass(frozen=True, slots=True)
class Rule:
    """A threshold on one metric and what to do about it."""

    metric: str
    problem: Problem
    advice: str
    at_end: bool = False  # the report judges the last step; False: all steps
    report_only: bool = False  # no alarm
    stale: bool | None = None  # the rule is for stale (True) or fresh (False) data only; None: for both
    unless: str = ""  # the rule does not apply to steps that have this metric

    def applies(self, history: History) -> bool:
        """Whether the last step has the metric, measured where and on the kind of data that the rule is for."""
        measured = history.last(self.metric) and not history.last(self.unless)
        return bool(measured) and self.stale in (None, history.stale)


def at_least(limit: float, sentence: str, *, steps: int = 1) -> Problem:
    """Problem: the metric is at least `limit`, or not finite, in each of the last `steps` steps."""

    def problem(history: History, name: str) -> str | None:
        values = history.last(name, steps)
        return sentence.format(values[-1]) if values and not any(value < limit for value in values) else None

    return problem


def spike(sentence: str, *, floor: float, limit: float = math.inf) -> Problem:
    """Problem: the metric is above `limit`, or above both `floor` and 10 times its median."""

    def problem(history: History, name: str) -> str | None:
        value = history.last(name)[0]
        earlier = history.before(name)
        usual = median(earlier) if len(earlier) >= 5 else math.inf

        if value > limit or value > max(floor, 10 * usual):
            comparison = f", median {usual:.2g}" if usual < math.inf else ""
            return f"{sentence}: {name} is {value:.3g}{comparison}."
        return None

    return problem

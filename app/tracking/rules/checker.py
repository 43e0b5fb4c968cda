"""Checks a run against the rules, step by step: the alarms of a run in progress, and the checks of its report."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.tracking.rules.rule import History
from app.tracking.rules.table import RULES

QUIET_STEPS = 20


@dataclass(frozen=True, slots=True)
class Reading:
    """The metric of a rule at one step, and what is wrong with it."""

    value: float
    problem: str | None  # one sentence


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that a step broke."""

    name: str
    text: str  # the problem and the advice


def check_rules(history: History) -> dict[str, Reading]:
    """Return a reading of each rule that applies to the last step."""
    return {
        name: Reading(history.last(rule.metric)[0], rule.problem(history, rule.metric))
        for name, rule in RULES.items()
        if rule.applies(history)
    }


class Alarms:
    """The alarms of a run in progress.

    Invariants:
    - An alarm is raised when its problem appears, not while the problem lasts.
    - It is not raised again for `QUIET_STEPS` steps; the interval quadruples each time.
    """

    def __init__(self, *, max_staleness: int = 0) -> None:
        self._history = History(max_staleness=max_staleness)
        self._active: set[str] = set()
        self._quiet_until: dict[str, int] = {}
        self._quiet_steps = dict.fromkeys(RULES, QUIET_STEPS)

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Add a step and return the alarms that it raises."""
        self._history.add(metrics)
        problems = {
            name: reading.problem
            for name, reading in check_rules(self._history).items()
            if reading.problem is not None and not RULES[name].report_only
        }

        raised = []
        for name, problem in problems.items():
            if name in self._active or step < self._quiet_until.get(name, step):
                continue
            self._quiet_until[name] = step + self._quiet_steps[name]
            self._quiet_steps[name] *= 4
            raised.append(Alarm(name, f"{problem} {RULES[name].advice}"))

        self._active = set(problems)
        return raised

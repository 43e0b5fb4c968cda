"""Alarms of a run in progress: `app.tracking.rules`, checked after every step."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.tracking.rules import RULES, History

QUIET_STEPS = 20


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that a step broke."""

    name: str
    step: int
    problem: str  # one sentence
    advice: str

    @property
    def text(self) -> str:
        return f"step {self.step}: {self.problem} {self.advice}"


class Alarms:
    """Checks the steps of a run, one by one, in order.

    Invariants:
    - An alarm is raised when its problem appears, not while the problem lasts.
    - It is not raised again for `QUIET_STEPS` steps; the interval quadruples each time.
    - Missing metrics raise nothing.
    """

    def __init__(self, *, max_staleness: int = 0) -> None:
        self._history = History(max_staleness=max_staleness)
        self._active: set[str] = set()
        self._quiet_until: dict[str, int] = {}
        self._quiet_steps = dict.fromkeys(RULES, QUIET_STEPS)

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Add a step and return the alarms that it raises."""
        self._history.add(metrics)

        problems = {name: rule.check(self._history) for name, rule in RULES.items() if not rule.report_only}
        raised = []
        for name, problem in problems.items():
            quiet = step < self._quiet_until.get(name, step)
            if problem is None or name in self._active or quiet:
                continue
            self._quiet_until[name] = step + self._quiet_steps[name]
            self._quiet_steps[name] *= 4
            raised.append(Alarm(name, step, problem, RULES[name].advice))

        self._active = {name for name, problem in problems.items() if problem is not None}
        return raised

"""One check of `mode=doctor`: its subject, its status, and how to fix it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class CheckStatus(Enum):
    """Result of a check."""

    ok = "ok"
    warn = "warn"  # the run starts, but something is worse than it could be
    fail = "fail"  # the run does not start, or fails later


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    subject: str
    status: CheckStatus
    message: str
    hint: str = ""  # empty if there is nothing to do


def check(subject: str, good: bool, message: str, hint: str, *, otherwise: CheckStatus = CheckStatus.fail) -> Check:
    """Return an ok check if `good`; else one with status `otherwise` and the hint."""
    return Check(subject, CheckStatus.ok, message) if good else Check(subject, otherwise, message, hint)


def table(checks: Sequence[Check]) -> str:
    """Format one line per check, each hint below its line, and the counts at the end."""
    width = max(len(one.subject) for one in checks)
    lines: list[str] = []
    for one in checks:
        lines.append(f"{one.status.name:<4}  {one.subject:<{width}}  {one.message}")
        if one.hint:
            lines.append(f"{'':<4}  {'':<{width}}  → {one.hint}")

    counts = [f"{sum(one.status is status for one in checks)} {status.name}" for status in reversed(CheckStatus)]
    return "\n".join([*lines, ", ".join(counts)])

"""What a check finds: a line of `mode=doctor`, and a warning of the run if it is one."""

from dataclasses import dataclass
from enum import Enum


class CheckStatus(Enum):
    """Result of a check."""

    ok = "ok"
    warn = "warn"  # the run starts, but something is worse than it could be
    fail = "fail"  # the run does not start, or fails later


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    subject: str
    message: str
    status: CheckStatus = CheckStatus.ok
    hint: str = ""  # how to fix it; empty if there is nothing to do


def outcome(subject: str, good: bool, message: str, hint: str, *, otherwise: CheckStatus = CheckStatus.fail) -> Finding:
    """Return an ok finding if `good`; else one with status `otherwise` and the hint."""
    return Finding(subject, message) if good else Finding(subject, message, otherwise, hint)

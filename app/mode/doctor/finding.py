"""One line of `mode=doctor`: what was looked at, how it is, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    ok = "ok"
    warn = "warn"  # the run starts, and something will be worse than it could be
    fail = "fail"  # the run will not start, or will not end well


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Verdict
    told: str
    advice: str = ""  # empty where there is nothing to do


def judged(subject: str, good: bool, told: str, advice: str, *, otherwise: Verdict = Verdict.fail) -> Finding:
    """ok where `good`; else `otherwise`, with the advice."""
    return Finding(subject, Verdict.ok, told) if good else Finding(subject, otherwise, told, advice)


def table(findings: Sequence[Finding]) -> str:
    """A line each, the advice under its line, and a count at the end."""
    width = max(len(finding.subject) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.verdict.name:<4}  {finding.subject:<{width}}  {finding.told}")
        if finding.advice:
            lines.append(f"{'':<4}  {'':<{width}}  → {finding.advice}")
    counts = [f"{sum(f.verdict is verdict for f in findings)} {verdict.name}" for verdict in reversed(Verdict)]
    return "\n".join([*lines, ", ".join(counts)])

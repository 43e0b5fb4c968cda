"""The three questions of a report: did it learn, where does the time go, is it healthy?

Each gets a short answer, an explanation and a tone. The health answer is that of `app.tracking.rules` over all steps.
"""

import math
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median

from app.tracking.number_format import count, duration, plural, seconds
from app.tracking.report.data import RunData
from app.tracking.rules.checker import Reading, check_rules
from app.tracking.rules.rule import History, Rule
from app.tracking.rules.table import RULES

SOLVED = 0.8  # training accuracy above which most groups are all correct
NOISE = 0.02  # smaller changes of accuracy do not count as learning
PHASES = {  # phase → its label, how to shorten it
    "generate": (
        "Generation",
        "use more rollout devices, a larger rollout.max_inflight_groups, or shorter completions",
    ),
    "train": ("Training", "use more trainer devices or a larger trainer.tokens_per_microbatch"),
    "sync": ("Weight sync", "see its phases below, and try weight_sync.transport and weight_sync.bucket_mib"),
    "other": ("Between the phases", "open timeline.json in ui.perfetto.dev to see what the run waits for"),
}


class Tone(Enum):
    """How good an answer is; the page's color."""

    good = "good"
    plain = "plain"
    warning = "warning"
    bad = "bad"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """The answer to one of the three questions."""

    question: str
    answer: str  # a few words
    explanation: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """A rule of `app.tracking.rules` over a whole run."""

    name: str
    value: str
    tone: Tone  # good or warning
    meaning: str  # of the value; the problem and the advice where there is one


def health_checks(run: RunData) -> list[HealthCheck]:
    """Answer the three questions."""
    return [learning_check(run), time_check(run), rules_check(run)]


def learning_check(run: RunData) -> HealthCheck:
    """Judge learning by the held-out accuracy; without one, by the reward of the first and the last steps."""
    question = "Did it learn?"
    accuracy = run.values("eval/accuracy")
    if len(accuracy) >= 2:
        return HealthCheck(question, *_accuracy_change(accuracy))

    reward = run.values("reward/mean")
    if len(reward) < 4:
        return HealthCheck(question, "Too early", "There are too few steps to tell.", Tone.plain)

    fifth = max(1, len(reward) // 5)
    first = fmean(reward[:fifth])
    last = fmean(reward[-fifth:])
    spread = max(fmean(abs(value - last) for value in reward[-fifth:]), 1e-9)
    explanation = (
        f"Mean reward went from {first:.3g} (first fifth) to {last:.3g} (last fifth). There was no evaluation."
    )
    if last - first > spread:
        return HealthCheck(question, "Yes", explanation, Tone.good)
    return HealthCheck(question, "Not visibly", explanation, Tone.warning)


def _accuracy_change(accuracy: list[float]) -> tuple[str, str, Tone]:
    """Return answer, explanation and tone for the held-out accuracy of each evaluation."""
    best = max(accuracy)
    change = accuracy[-1] - accuracy[0]
    peak = f" (best {best:.1%})" if best > accuracy[-1] else ""
    explanation = f"Held-out accuracy went from {accuracy[0]:.1%} to {accuracy[-1]:.1%}{peak}."

    if change < -NOISE:
        return "No, it got worse", explanation, Tone.bad
    if change <= NOISE:
        return "Not visibly", explanation, Tone.warning
    if best - accuracy[-1] > max(NOISE, change):
        return "Yes, then it declined", explanation, Tone.warning
    return "Yes", explanation, Tone.good


def time_check(run: RunData) -> HealthCheck:
    """Name the phase with the largest share of the time of all steps, and how to shorten it."""
    question = "Where does the time go?"
    if not run.values("time/step"):
        return HealthCheck(question, "Not measured", "No step was finished.", Tone.plain)

    step = fmean(row["time/step"] for row in measured_steps(run))
    shares = {name: value / step for name, value in phase_means(run).items()}
    longest = max(shares, key=lambda name: shares[name])
    label, remedy = PHASES[longest]

    rate = run.values("throughput/completion_tokens_per_second")
    speed = f", {count(median(rate))} completion tokens/s" if rate else ""
    phases = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    overlap = " (phases overlap)" if sum(shares.values()) > 1.05 else ""
    explanation = f"The mean step takes {seconds(step)}{speed}: {phases}{overlap}."

    total = run.summary.get("total/seconds", 0.0)
    outside = total - run.summary.get("total/step_seconds", total)
    if outside > 0:
        explanation += f" Startup, evaluation and the rest took {duration(outside)} of {duration(total)}."
    explanation += f" To speed it up: {remedy}."

    overhead = longest in ("sync", "other") and shares[longest] > 0.4
    tone = Tone.warning if overhead else Tone.plain
    return HealthCheck(question, f"{label} ({min(shares[longest], 1):.0%})", explanation, tone)


def measured_steps(run: RunData) -> list[dict[str, float]]:
    """Return the rows of finished steps, which have a time."""
    return [row for row in run.rows if row.get("time/step") is not None]


def phase_means(run: RunData) -> dict[str, float]:
    """Return the seconds per step of each phase and of the time outside of phases (0 where phases overlap).

    Means over all steps, unlike medians, add up to the mean step.
    """
    steps = measured_steps(run)
    if not steps:
        return {}

    means: dict[str, float] = {}
    for name in ("generate", "train", "sync"):
        values = [row[f"time/{name}"] for row in steps if row.get(f"time/{name}") is not None]
        if values:
            means[name] = math.fsum(values) / len(steps)
    whole = fmean(row["time/step"] for row in steps)
    return {**means, "other": max(0.0, whole - sum(means.values()))}


def rules_check(run: RunData) -> HealthCheck:
    """Summarize the rules, the warnings and how the run ended."""
    question = "Is it healthy?"
    if run.summary.get("status") == "failed":
        error = str(run.summary.get("error", "No error was recorded."))
        return HealthCheck(question, "It failed", error, Tone.bad)

    checks = rule_checks(run)
    if not checks:
        explanation = f"No step was measured; {plural(len(run.warnings), 'warning')}."
        return HealthCheck(question, "Nothing to check", explanation, Tone.plain)

    problems = [check.name for check in checks if check.tone is Tone.warning]
    warnings = plural(len(run.warnings), "warning")
    if problems:
        return HealthCheck(question, "Look closer", f"Unusual: {', '.join(problems)}; {warnings}.", Tone.warning)
    return HealthCheck(question, "Yes", f"{plural(len(checks), 'check')} passed; {warnings}.", Tone.good)


def rule_checks(run: RunData) -> list[RuleCheck]:
    """Check each rule whose metric was measured."""
    history = History(max_staleness=run.config.get("placement.max_staleness", math.inf))
    steps = []
    for row in run.rows:
        history.add(row)
        steps.append(check_rules(history))
    solved = fmean(run.values("reward/accuracy")[-5:] or [0.0]) > SOLVED

    checks = []
    for name, rule in RULES.items():
        readings = [step[name] for step in steps if name in step]
        if readings:
            expected = solved and name == "no reward variance"  # the answers of a group are all correct
            checks.append(_rule_check(name, rule, readings[-1:] if rule.at_end else readings, expected))
    return checks


def _rule_check(name: str, rule: Rule, readings: list[Reading], expected: bool) -> RuleCheck:
    """Summarize the readings that judge a rule; a problem that is `expected` is none."""
    value = max((reading.value for reading in readings if math.isfinite(reading.value)), default=math.nan)
    shown = count(value) if value >= 1000 else f"{value:.3g}"
    if rule.metric.endswith("_fraction"):
        shown = f"{value:.1%}"

    problems = [reading.problem for reading in readings if reading.problem is not None]
    if problems and not expected:
        return RuleCheck(name, shown, Tone.warning, f"{problems[-1]} {rule.advice}")
    return RuleCheck(name, shown, Tone.good, f"{rule.metric}, {'last step' if rule.at_end else 'largest'}")

"""The three questions of a report: did it learn, where does the time go, is it healthy?

Each gets a short answer, an explanation and a tone. The health answer is that of `app.tracking.rules` over all steps.
"""

import math
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from app.tracking.number_format import count, duration, plural, seconds
from app.tracking.report.data import RunData
from app.tracking.rules import RULES, History, check_rules

NOISE = 0.02  # smaller changes of accuracy do not count as learning
MIN_PROMPTS = 5  # of fewer, no change tells anything
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
class Check:
    """The answer to one of the three questions, or the value of a rule over a whole run."""

    question: str  # or the rule's name
    answer: str  # a few words, or the rule's value
    explanation: str
    tone: Tone
    over: bool = False  # an alarm was raised for it, and its problem is gone


def health_checks(run: RunData) -> list[Check]:
    """Answer the three questions."""
    return [learning_check(run), time_check(run), rules_check(run)]


def learning_check(run: RunData) -> Check:
    """Judge learning by the held-out accuracy; without one, by the reward of the first and the last steps."""
    question = "Did it learn?"
    evaluations = [row for row in run.rows if row.get("eval/accuracy") is not None]
    if len(evaluations) >= 2:
        first, last = evaluations[0]["eval/accuracy"], evaluations[-1]["eval/accuracy"]
        best = max(row["eval/accuracy"] for row in evaluations)
        # Two standard errors of the difference, as if the evaluations had different prompts.
        chance = 2 * math.hypot(*(row.get("eval/accuracy_stderr") or 0.0 for row in (evaluations[0], evaluations[-1])))
        if run.summary.get("eval/prompts", MIN_PROMPTS) < MIN_PROMPTS:  # of 0 or 1 alone the error is 0
            chance = 1.0

        peak = f" (best {best:.1%})" if best > last else ""
        explanation = f"Held-out accuracy went from {first:.1%} to {last:.1%}{peak}."
        if NOISE < abs(last - first) <= chance:
            explanation += f" A change of up to {100 * chance:.1f} points may be chance."
            return Check(question, "Too few prompts to tell", explanation, Tone.plain)
        if last - first < -NOISE:
            return Check(question, "No, it got worse", explanation, Tone.bad)
        if last - first <= NOISE:
            return Check(question, "Not visibly", explanation, Tone.warning)
        if best - last > last - first:
            return Check(question, "Yes, then it declined", explanation, Tone.warning)
        return Check(question, "Yes", explanation, Tone.good)

    what, values = ("Cross-entropy", run.values("loss/ce")) if run.imitates else ("Reward", run.values("reward/mean"))
    if len(values) < 4:
        return Check(question, "Too early", "There are too few steps to tell.", Tone.plain)

    fifth = max(1, len(values) // 5)
    first, last = fmean(values[:fifth]), fmean(values[-fifth:])
    spread = max(fmean(abs(value - last) for value in values[-fifth:]), 1e-9)
    explanation = f"{what} went from {first:.3g} (first fifth) to {last:.3g} (last fifth). There was no evaluation."
    if (first - last if run.imitates else last - first) > spread:
        return Check(question, "Yes", explanation, Tone.good)
    return Check(question, "Not visibly", explanation, Tone.warning)


def time_check(run: RunData) -> Check:
    """Name the phase with the largest share of the time of all steps, and how to shorten it."""
    question = "Where does the time go?"
    steps = [row for row in run.rows if row.get("time/step") is not None]
    if not steps:
        return Check(question, "Not measured", "No step was finished.", Tone.plain)

    # Sums, because the medians of the phases do not add up to the median step.
    whole = math.fsum(row["time/step"] for row in steps)
    shares = {
        name: math.fsum(row.get(f"time/{name}") or 0.0 for row in steps) / whole
        for name in ("generate", "train", "sync")
        if run.values(f"time/{name}")
    }
    shares["other"] = max(0.0, 1 - sum(shares.values()))  # 0 where phases overlap
    longest = max(shares, key=lambda name: shares[name])
    label, remedy = PHASES[longest]

    phases = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    overlap = " (phases overlap)" if sum(shares.values()) > 1.05 else ""
    explanation = f"The mean step takes {seconds(whole / len(steps))}: {phases}{overlap}."
    total = run.summary.get("total/seconds", 0.0)
    outside = total - run.summary.get("total/step_seconds", total)
    if outside > 0:
        explanation += f" Startup, evaluation and the rest took {duration(outside)} of {duration(total)}."
    if outside > total / 2:
        return Check(question, f"Outside the steps ({outside / total:.0%})", explanation, Tone.plain)

    tone = Tone.warning if longest in ("sync", "other") and shares[longest] > 0.4 else Tone.plain
    answer = f"{label} ({min(shares[longest], 1):.0%})"
    return Check(question, answer, f"{explanation} To speed it up: {remedy}.", tone)


def rules_check(run: RunData) -> Check:
    """Summarize the rules, the warnings and how the run ended."""
    question = "Is it healthy?"
    if run.summary.get("status") == "failed":
        return Check(question, "It failed", str(run.summary.get("error", "No error was recorded.")), Tone.bad)

    warnings = plural(len(run.warnings), "warning")
    checks = rule_checks(run)
    if not checks:
        return Check(question, "Nothing to check", f"No step was measured; {warnings}.", Tone.plain)

    problems = ", ".join(check.question for check in checks if check.tone is Tone.warning)
    over = ", ".join(check.question for check in checks if check.over)
    ended = f"{warnings}{', over by the end: ' * bool(over)}{over}"
    if problems:
        return Check(question, "Look closer", f"Unusual: {problems}; {ended}.", Tone.warning)
    return Check(question, "Yes", f"{plural(len(checks), 'check')} passed; {ended}.", Tone.good)


def rule_checks(run: RunData) -> list[Check]:
    """Check each rule whose metric was measured."""
    history = History(max_staleness=run.config.get("placement.max_staleness", math.inf))
    found: dict[str, list[tuple[float, str | None]]] = {name: [] for name in RULES}  # value and problem of each step
    for row in run.rows:
        history.add(row["step"], row)
        for name, problem in check_rules(history).items():
            found[name].append((history.last(RULES[name].metric)[0], problem))

    checks = []
    for name, steps in ((name, steps) for name, steps in found.items() if steps):
        rule = RULES[name]
        judged = steps[-1:] if rule.at_end else steps
        value = max((value for value, _ in judged if math.isfinite(value)), default=math.nan)
        shown = count(value) if value >= 1000 else f"{value:.3g}"
        shown = f"{value:.1%}" if rule.metric.endswith("_fraction") else shown

        problems = [problem for _, problem in judged if problem is not None]
        over = not problems and any(problem is not None for _, problem in steps)
        text = f"{rule.metric}, {'last step' if rule.at_end else 'largest'}"
        text = f"{problems[-1]} {rule.advice}" if problems else text
        checks.append(Check(name, shown, text, Tone.warning if problems else Tone.good, over))
    return checks

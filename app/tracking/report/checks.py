"""The three questions people open a report with: did it learn, where does its time go, is it sane?

Each answer is one word, one sentence and a tone; the checks behind "is it sane" are listed one by one. They judge from
the whole run, as `app.tracking.alarms` judges step by step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median

from app.tracking.number_format import count, duration, seconds
from app.tracking.report.data import RunData

NOISE = 0.02  # a smaller change of accuracy is not seen as learning
FASTER = {  # what makes a phase shorter
    "generate": "more rollout devices, a larger rollout.max_inflight_groups, or shorter completions",
    "train": "more trainer devices or a larger trainer.tokens_per_microbatch",
    "sync": "look at the phases of a push below, and at weight_sync.transport and bucket_mib",
    "other": "timeline.json in ui.perfetto.dev shows what is waited for",
}


class Tone(Enum):
    good = "good"
    plain = "plain"
    warning = "warning"
    bad = "bad"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    question: str
    word: str
    sentence: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    value: str
    tone: Tone  # good or warning
    meaning: str


def verdicts(run: RunData) -> list[HealthCheck]:
    return [learned(run), speed(run), sane(run)]


def learned(run: RunData) -> HealthCheck:
    """From the held-out accuracy; where there is none, from the reward of the first and the last steps."""
    question = "Did it learn?"
    accuracy = run.values("eval/accuracy")
    if len(accuracy) >= 2:
        change, best = accuracy[-1] - accuracy[0], max(accuracy)
        where = f"Held-out accuracy went from {accuracy[0]:.1%} to {accuracy[-1]:.1%}"
        tail = f" (best {best:.1%})." if best > accuracy[-1] else "."
        if change > NOISE:
            lost = best - accuracy[-1] > max(NOISE, change)
            return HealthCheck(question, "Yes, then lost some" if lost else "Yes", where + tail, _tone(lost))
        word, tone = ("No, it got worse", Tone.bad) if change < -NOISE else ("Not visibly", Tone.warning)
        return HealthCheck(question, word, where + tail, tone)
    reward = run.values("reward/mean")
    if len(reward) < 4:
        return HealthCheck(question, "Too early", "There are too few steps to tell.", Tone.plain)
    part = max(1, len(reward) // 5)
    first, last = fmean(reward[:part]), fmean(reward[-part:])
    spread = max(fmean(abs(value - fmean(reward[-part:])) for value in reward[-part:]), 1e-9)
    sentence = f"Reward went from {first:.3g} (first fifth) to {last:.3g} (last fifth); nothing held out was evaluated."
    if last - first > spread:
        return HealthCheck(question, "Yes", sentence, Tone.good)
    return HealthCheck(question, "Not visibly", sentence, Tone.warning)


def speed(run: RunData) -> HealthCheck:
    """The largest phase of the median step."""
    question = "Where does the time go?"
    step = run.values("time/step")
    if not step:
        return HealthCheck(question, "Not measured", "No step was finished.", Tone.plain)
    shares = {name: value / median(step) for name, value in phase_medians(run).items()}
    largest = max(shares, key=lambda name: shares[name], default="other")
    words = {"generate": "Generating", "train": "Training", "sync": "Weight sync", "other": "Between the phases"}
    rate = run.values("throughput/completion_tokens_per_second")
    pace = f", {count(median(rate))} completion tokens/s" if rate else ""
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    overlap = " (they overlap)" if sum(shares.values()) > 1.05 else ""
    sentence = f"A step takes {seconds(median(step))} (median){pace}: {parts}{overlap}."
    total, stepping = run.summary.get("total/seconds"), run.summary.get("total/step_seconds")
    if total and stepping and total > stepping:
        sentence += f" Start-up, evaluation and the rest: {duration(total - stepping)} of {duration(total)}."
    sentence += f" To go faster: {FASTER[largest]}."
    slow = largest in ("sync", "other") and shares[largest] > 0.4
    return HealthCheck(question, f"{words[largest]} ({min(shares[largest], 1):.0%})", sentence, _tone(slow, Tone.plain))


def phase_medians(run: RunData) -> dict[str, float]:
    """Median seconds of each phase of a step, and of what no phase took (0 where phases overlap)."""
    found = {
        name: median(run.values(f"time/{name}")) for name in ("generate", "train", "sync") if run.values(f"time/{name}")
    }
    whole = run.values("time/step")
    return {**found, "other": max(0.0, median(whole) - sum(found.values()))} if whole else found


def sane(run: RunData) -> HealthCheck:
    question, bad = "Is it sane?", [check for check in checks(run) if check.tone is not Tone.good]
    status = run.summary.get("status")
    if status == "failed":
        return HealthCheck(question, "It failed", str(run.summary.get("error", "No error was recorded.")), Tone.bad)
    said = f"{len(run.warnings)} warning{'' if len(run.warnings) == 1 else 's'}"
    if bad:
        names = ", ".join(check.name.lower() for check in bad)
        return HealthCheck(question, "Look closer", f"Out of the usual: {names}; {said}.", Tone.warning)
    sentence = f"All {len(checks(run))} checks are within their usual range; {said}."
    return HealthCheck(question, "Yes", sentence, Tone.good)


def checks(run: RunData) -> list[Check]:
    """What was measured and whether it is in its usual range, over the whole run."""
    found = []
    for rule in RULES:
        values = run.values(rule.metric)
        if values:
            value = rule.pick(values)
            tone = Tone.good if rule.fine(value, run) else Tone.warning
            found.append(Check(rule.name, rule.form.format(value), tone, rule.meaning))
    return found


def _newest(values: list[float]) -> float:
    return values[-1]


def _solved(run: RunData) -> bool:
    """Then groups that are all right are no worry."""
    return fmean(run.values("reward/accuracy")[-5:] or [0.0]) > 0.8


def _within_bound(value: float, run: RunData) -> bool:
    return value <= run.config.get("placement.max_staleness", math.inf)


@dataclass(frozen=True, slots=True)
class Rule:
    """How one number of a run becomes a check."""

    name: str
    metric: str
    pick: Callable[[list[float]], float]
    fine: Callable[[float, RunData], bool]
    form: str
    meaning: str


FAILED, RESTARTS = "reward/failed_fraction", "recovery/engine_restarts"
CUT, EQUAL = "completion/truncated_fraction", "reward/zero_std_fraction"
RULES = (
    Rule(
        "Mismatch", "mismatch/kl", max, lambda v, _: v < 0.01, "{:.2g}", "largest KL of the engine's log-probabilities"
    ),
    Rule("Staleness", "staleness/max", max, _within_bound, "{:.0f} pushes", "largest, against placement.max_staleness"),
    Rule("Gradient norm", "grad_norm", max, lambda v, _: v < 100, "{:.3g}", "largest, before clipping"),
    Rule("Entropy", "entropy", _newest, lambda v, run: v > 1e-3 or _solved(run), "{:.3g}", "what is left at the end"),
    Rule("Truncated", CUT, _newest, lambda v, _: v < 0.5, "{:.1%}", "of the last step's completions"),
    Rule(
        "No spread", EQUAL, _newest, lambda v, run: v < 0.9 or _solved(run), "{:.1%}", "of the last groups: no gradient"
    ),
    Rule("Rewards failed", FAILED, max, lambda v, _: v < 0.05, "{:.1%}", "most in one step: timeouts and crashes"),
    Rule("Engine restarts", RESTARTS, max, lambda v, _: v == 0, "{:.0f}", "engines lost and started again"),
)


def _tone(worry: bool, otherwise: Tone = Tone.good) -> Tone:
    return Tone.warning if worry else otherwise

"""Rules for unhealthy metrics: failures of RL runs that are otherwise noticed days late. Few false alarms.

Invariant: the alarms of a run, its last lines on the screen and its report agree. All apply `RULES` to the same rows.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median, pstdev

WINDOW = 30  # steps that a rule looks back on
SOLVED = 0.8  # training accuracy above which most groups are all correct
FIRST = 5  # values of each metric that are kept from the beginning
QUIET_STEPS = 20  # after an alarm


class History:
    """The most recent steps of a run, and of each metric the first values and the extremes of the whole run.

    Example:
        history = History(max_staleness=0)
        history.add(1, {"entropy": 1.2})
        history.add(2, {"entropy": 1.1})
        history.last("entropy", 2)  # [1.2, 1.1]
        history.before("entropy")  # [1.2]
    """

    def __init__(self, *, max_staleness: float = 0) -> None:
        self.max_staleness = max_staleness
        self.first: dict[str, list[float]] = {}
        self.smallest: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self._step: int | None = None
        self._steps: list[Mapping[str, float]] = []  # oldest first

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add the metrics of the next step, or further ones of the last step, such as its evaluation.

        None is what `metrics.jsonl` holds for NaN and infinity.
        """
        values = {name: math.nan if value is None else value for name, value in metrics.items()}
        earlier = self._steps.pop() if step == self._step else {}
        self._step = step
        self._steps = [*self._steps, {**earlier, **values}][-WINDOW:]

        for name, value in values.items():
            if math.isfinite(value):
                self.first[name] = [*self.first.get(name, ()), value][:FIRST]
                self.smallest[name] = min(value, self.smallest.get(name, value))
                self.largest[name] = max(value, self.largest.get(name, value))

    def last(self, name: str, count: int = 1) -> list[float]:
        """Return a metric's values in the last `count` steps, or an empty list unless all of them have it."""
        values = [step[name] for step in self._steps[-count:] if name in step]
        return values if len(values) == count else []

    def before(self, name: str, skip: int = 1) -> list[float]:
        """Return a metric's finite values in the steps before the last `skip`."""
        return [step[name] for step in self._steps[:-skip] if math.isfinite(step.get(name, math.nan))]


Problem = Callable[[History, str], str | None]  # history, metric name → one sentence about the last step


@dataclass(frozen=True, slots=True)
class Rule:
    """A threshold on one metric and what to do about it."""

    metric: str
    problem: Problem
    advice: str
    at_end: bool = True  # the report judges the last step; False: all steps


def at_least(limit: float, sentence: str, *, steps: int = 1) -> Problem:
    """Problem: the metric is at least `limit`, or not finite, in each of the last `steps` steps."""

    def problem(history: History, name: str) -> str | None:
        values = history.last(name, steps)
        return sentence.format(values[-1]) if values and not any(value < limit for value in values) else None

    return problem


def no_reward_variance(history: History, name: str) -> str | None:
    """Problem: nearly all groups have equal rewards, or most of them for long; expected once the data is solved."""
    recent, longer = history.last(name, 3), history.last(name, 10)
    flat = bool(recent) and min(recent) >= 0.95
    if not flat and not (longer and min(longer) >= 0.75):
        return None
    accuracy = history.last("reward/accuracy", 3)
    if accuracy and fmean(accuracy) >= SOLVED and history.smallest[name] < 0.5:
        return None  # it has learned, and its groups are all right

    share = recent[-1] if flat else fmean(longer)
    sentence = f"In {share:.0%} of the groups all completions have the same reward: no gradient."
    right, wrong = history.last("reward/all_correct_fraction"), history.last("reward/all_wrong_fraction")
    if right and wrong:
        mixed = 1 - right[0] - wrong[0]
        sentence += f" {right[0]:.0%} of the groups are all right, {wrong[0]:.0%} all wrong, {mixed:.0%} mixed."
    return sentence


def identical_completions(history: History, name: str) -> str | None:
    """Problem: most groups are copies of one completion, also among those that are not all right."""
    values = history.last(name, 3)
    right = history.last("reward/all_correct_fraction", 3) or [0.0] * 3
    if not values or min(one - other for one, other in zip(values, right, strict=True)) < 0.5:
        return None
    return f"In {values[-1]:.0%} of the groups all completions are copies of one: nothing is explored."


def accuracy_is_zero(history: History, name: str) -> str | None:
    """Problem: nothing counts as right although rewards differ."""
    values, flat = history.last(name, 10), history.last("reward/zero_std_fraction", 10)
    if not values or max(values) > 0 or not flat or fmean(flat) > 0.75:
        return None
    return "The accuracy has been 0 for 10 steps, although rewards differ within the groups."


def accuracy_fell(history: History, name: str) -> str | None:
    """Problem: the held-out accuracy falls while the reward rises."""
    accuracy, before = history.last(name)[0], history.first.get(name, [])
    reward, first = history.last("reward/mean", FIRST), history.first.get("reward/mean", [])
    noise = max(0.05, 3 * max(history.last("eval/accuracy_stderr"), default=0.0))
    if not reward or len(first) < FIRST or not before or accuracy > before[0] - noise:
        return None
    if fmean(reward) - fmean(first) <= 2 * max(pstdev(reward), pstdev(first)):
        return None
    return (
        f"The reward rose from {fmean(first):.3g} to {fmean(reward):.3g}, but the held-out accuracy fell from "
        f"{before[0]:.1%} to {accuracy:.1%}."
    )


def unmoved_weights(history: History, name: str) -> str | None:
    """Problem: no update so far has moved the weights, although there was a gradient."""
    largest = history.largest.get(name, math.inf)
    if len(history.first.get(name, ())) < FIRST or largest >= 1e-6 or not history.largest.get("grad_norm"):
        return None
    return f"No update so far has changed the weights by more than {largest:.1g} of their size."


def policies_differ(history: History, name: str) -> str | None:
    """Problem: engine and trainer differ by more than rounding; on stale data, by more than a few updates explain."""
    stale = max(history.last("staleness/max"), default=0.0) > 0
    floor, limit = (0.1, 0.3) if stale else (1e-3, 0.1)
    value, earlier = history.last(name)[0], history.before(name)
    usual = median(earlier) if len(earlier) >= FIRST else math.inf
    if not value > min(limit, max(floor, 10 * usual)):
        return None

    what = "The trained policy is far from the rollout policies" if stale else "Engine and trainer differ"
    return f"{what}: {name} is {value:.3g}{f', median {usual:.2g}' * (usual < math.inf)}."


def entropy_collapse(history: History, name: str) -> str | None:
    """Problem: entropy is nearly gone although many answers are wrong; with correct answers it is expected."""
    value, first = history.last(name)[0], history.first.get(name, [])
    accuracy = history.last("reward/accuracy", 5)
    if len(first) < FIRST or (accuracy and fmean(accuracy) >= 0.7) or not value < 0.05 * fmean(first):
        return None
    return f"Entropy fell from {fmean(first):.3g} to {value:.2g}: the policy has almost stopped exploring."


def throughput_drop(history: History, name: str) -> str | None:
    """Problem: throughput halved."""
    recent, earlier = history.last(name, 3), history.before(name, 3)
    if not recent or len(earlier) < 10 or not max(recent) < 0.5 * median(earlier):
        return None
    return f"Throughput fell from {median(earlier):.0f} to {fmean(recent):.0f} completion tokens per second."


def stale_data(history: History, name: str) -> str | None:
    """Problem: staleness exceeds its bound, or stays close to it.

    At a bound of 1, staleness 1 is normal: it only means that generation and training overlap.
    """
    bound = history.max_staleness
    largest = max(history.last("staleness/max"), default=0.0)
    if largest > bound:
        return f"A trajectory of staleness {largest:.0f} was trained on; the bound is {bound:.0f}."

    means = history.last(name, 5)
    if bound > 1 and means and min(means) >= 0.9 * bound:
        return f"Staleness is at its bound of {bound:.0f}: engines wait for the trainer."
    return None


RULES = {
    "no reward variance": Rule(
        "reward/zero_std_fraction",
        no_reward_variance,
        "Read samples/. Where answers are wrong, check data.answer, the reward's parsing and the prompt's format, "
        "then try easier data or a larger algorithm.group_size. Where they are right, check that wrong ones get less, "
        "then try harder data or algorithm.dynamic_sampling=true.",
    ),
    "identical completions": Rule(
        "completion/identical_fraction",
        identical_completions,
        "Try a higher rollout.temperature, such as 1. If it is that already, the policy has collapsed: "
        "try a smaller trainer.lr and an earlier checkpoint.",
    ),
    "accuracy of 0": Rule(
        "reward/accuracy",
        accuracy_is_zero,
        "If samples/ has right answers, the reward has another scale or the wrong sign: above 0.5 counts as right, "
        "unless a built-in component judges, such as exact with weight 0 in reward.components.",
    ),
    "reward against accuracy": Rule(
        "eval/accuracy",
        accuracy_fell,
        "Read samples/ for what is rewarded: a reward of the wrong sign, one that can be had without the right answer, "
        "or training data that differs from the evaluation's.",
    ),
    "unmoved weights": Rule(
        "updates/relative_change",
        unmoved_weights,
        "Try a larger trainer.lr (1e-6 for all weights of a model of billions, ten times that for adapters).",
    ),
    "mismatch": Rule(
        "mismatch/kl",
        policies_differ,
        "Try weight_sync.verify=always (did the weights arrive?), the same dtype for both, or algorithm.correction=tis "
        "or icepop; on stale data a smaller trainer.lr or placement.max_staleness.",
        at_end=False,
    ),
    "entropy collapse": Rule(
        "entropy",
        entropy_collapse,
        "Try a smaller trainer.lr, rollout.temperature=1, a small algorithm.entropy_coefficient, or, with several "
        "algorithm.updates_per_step, a higher algorithm.clip_high (0.28).",
    ),
    "truncated completions": Rule(
        "completion/truncated_fraction",
        at_least(0.8, "{:.0%} of the completions hit the token limit.", steps=2),
        "Try a larger rollout.max_completion_tokens, check that the chat template lets the model stop, or penalize "
        "length with algorithm.overlong_buffer_fraction.",
    ),
    "throughput": Rule(
        "throughput/completion_tokens_per_second",
        throughput_drop,
        "Find the slow phase in timeline.json. Look for longer completions (completion/length_p95), other load on the "
        "machine, or a lost engine (logs/).",
    ),
    "staleness": Rule(
        "staleness/mean",
        stale_data,
        "Try more placement.trainer_devices and fewer placement.rollout_devices, or a smaller placement.max_staleness.",
        at_end=False,
    ),
    "reward failures": Rule(
        "reward/failed_fraction",
        at_least(0.05, "{:.0%} of the rewards so far, evaluations included, failed; their trajectories score 0."),
        "Every error is in logs/reward.log. If they timed out, try a larger reward.timeout_s or more reward.workers.",
        at_end=False,
    ),
    "failed episodes": Rule(
        "environment/failed_fraction",
        at_least(0.05, "{:.0%} of the episodes so far, evaluations included, failed and left their groups."),
        "Every error is in logs/environment.log. If steps were late, try a larger environment.timeout_s.",
        at_end=False,
    ),
    "gradient not finite": Rule(
        "updates/skipped",
        at_least(1, "{:.0f} update(s) of the step were skipped: the gradient was not finite."),
        "Try a smaller trainer.lr. If it persists, look at mismatch/max_ratio and the longest samples.",
        at_end=False,
    ),
}


def check_rules(history: History) -> dict[str, str | None]:
    """Return the problem, if any, of each rule whose metric the last step has."""
    return {name: rule.problem(history, rule.metric) for name, rule in RULES.items() if history.last(rule.metric)}


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

    def check(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """Add a step or its evaluation. Return the alarms that it raises: name of the rule → problem and advice."""
        self._history.add(step, metrics)
        problems = {name: problem for name, problem in check_rules(self._history).items() if problem is not None}

        raised = {}
        for name, problem in problems.items():
            if name not in self._active and step >= self._quiet_until.get(name, step):
                self._quiet_until[name] = step + self._quiet_steps[name]
                self._quiet_steps[name] *= 4
                raised[name] = f"{problem} {RULES[name].advice}"
        self._active = set(problems)
        return raised

"""What counts as an unhealthy metric: the alarms of a run in progress, and the checks of its report.

A rule is about one metric and the steps that it looks back on. Thresholds favor few false alarms. The rules cover
failures that users of RL systems tend to notice days late.

Invariants:
- A problem of the report is one that raised an alarm during the run: both apply this table to the same rows.
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
        history.add({"entropy": 1.2})
        history.add({"entropy": 1.1})
        history.last("entropy", 2)  # [1.2, 1.1]
        history.before("entropy")  # [1.2]
    """

    def __init__(self, *, max_staleness: float = 0) -> None:
        self.max_staleness = max_staleness
        self.first: dict[str, list[float]] = {}
        self.smallest: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self._steps: list[Mapping[str, float]] = []  # oldest first

    def add(self, metrics: Mapping[str, float | None], *, same_step: bool = False) -> None:
        """Append the metrics of the next step, or add more of the last one, as those of its evaluation.

        None is what `metrics.jsonl` holds for NaN and infinity.
        """
        values = {name: math.nan if value is None else value for name, value in metrics.items()}
        earlier = self._steps.pop() if same_step else {}
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
    report_only: bool = False  # it may be meant: shown in the report, neither an alarm nor unhealthy
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
    accuracy = history.last(name)[0]
    reward, first = history.last("reward/mean", FIRST), history.first.get("reward/mean", [])
    noise = max(0.05, 3 * max(history.last("eval/accuracy_stderr"), default=0.0))
    if not reward or len(first) < FIRST or accuracy > history.first[name][0] - noise:
        return None
    if fmean(reward) - fmean(first) <= 2 * max(pstdev(reward), pstdev(first)):
        return None
    return (
        f"The reward rose from {fmean(first):.3g} to {fmean(reward):.3g}, but the held-out accuracy fell from "
        f"{history.first[name][0]:.1%} to {accuracy:.1%}."
    )


def unmoved_weights(history: History, name: str) -> str | None:
    """Problem: no update so far has moved the weights, although there was a gradient."""
    largest = history.largest.get(name, math.inf)
    if len(history.first.get(name, ())) < FIRST or largest >= 1e-6 or not history.largest.get("grad_norm"):
        return None
    return f"No update so far has changed the weights by more than {largest:.1g} of their size."


def entropy_collapse(history: History, name: str) -> str | None:
    """Problem: entropy is nearly gone although many answers are wrong; with correct answers it is expected."""
    value = history.last(name)[0]
    accuracy = history.last("reward/accuracy", 5)
    first = history.first.get(name, [])
    if len(first) < FIRST or (accuracy and fmean(accuracy) >= 0.7):
        return None

    if value < 0.05 * fmean(first):
        return f"Entropy fell from {fmean(first):.3g} to {value:.2g}: the policy has almost stopped exploring."
    return None


def throughput_drop(history: History, name: str) -> str | None:
    """Problem: throughput halved."""
    recent = history.last(name, 3)
    earlier = history.before(name, 3)
    if recent and len(earlier) >= 10 and max(recent) < 0.5 * median(earlier):
        return f"Throughput fell from {median(earlier):.0f} to {fmean(recent):.0f} completion tokens per second."
    return None


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


def engine_restarted(history: History, name: str) -> str | None:
    """Problem: the count of restarts grew."""
    count = history.last(name)[0]
    if count > max(history.before(name)[-1:], default=0):
        return f"An engine was restarted ({count:.0f} so far)."
    return None


GRADIENT_ADVICE = "Try a smaller trainer.lr. If it persists, look at mismatch/max_ratio and the longest samples."
KL_ADVICE = (
    "Try a smaller trainer.lr, fewer algorithm.updates_per_step, or algorithm.kl=k2 and algorithm.kl_coefficient."
)
RULES = {
    "no reward variance": Rule(
        "reward/zero_std_fraction",
        no_reward_variance,
        "Read samples/. Where answers are wrong, check data.answer, the reward's parsing and the prompt's format, "
        "then try easier data or a larger algorithm.group_size. Where they are right, check that wrong ones get less, "
        "then try harder data or algorithm.dynamic_sampling=true.",
        at_end=True,
    ),
    "identical completions": Rule(
        "completion/identical_fraction",
        identical_completions,
        "Try a higher rollout.temperature, such as 1. If it is that already, the policy has collapsed: "
        "try a smaller trainer.lr and an earlier checkpoint.",
        at_end=True,
    ),
    "accuracy of 0": Rule(
        "reward/accuracy",
        accuracy_is_zero,
        "If samples/ has right answers, the reward has another scale or the wrong sign: above 0.5 counts as right, "
        "unless a built-in component judges, such as exact with weight 0 in reward.components.",
        at_end=True,
    ),
    "reward against accuracy": Rule(
        "eval/accuracy",
        accuracy_fell,
        "Read samples/ for what is rewarded: a reward of the wrong sign, one that can be had without the right answer, "
        "or training data that differs from the evaluation's.",
        at_end=True,
    ),
    "unmoved weights": Rule(
        "updates/relative_change",
        unmoved_weights,
        "Try a larger trainer.lr (1e-6 for all weights of a model of billions, ten times that for adapters).",
        at_end=True,
    ),
    "mismatch": Rule(
        "mismatch/kl",
        spike("The log-probabilities of engine and trainer differ", floor=1e-3, limit=0.1),
        "Try weight_sync.verify=always (did the weights arrive?), the same dtype for both, or algorithm.correction=tis "
        "or icepop.",
        stale=False,
    ),
    "drift": Rule(
        "mismatch/kl",
        spike("The trained policy is far from the rollout policies", floor=0.1, limit=0.3),
        "Try a smaller trainer.lr or placement.max_staleness, or algorithm.correction=icepop.",
        stale=True,
    ),
    "KL to the old policy": Rule("kl/old", spike("The updates of one step move the policy far", floor=0.1), KL_ADVICE),
    "KL to the reference": Rule("kl/reference", spike("The policy moves far from the reference", floor=0.1), KL_ADVICE),
    "entropy collapse": Rule(
        "entropy",
        entropy_collapse,
        "Try a smaller trainer.lr, rollout.temperature=1, a small algorithm.entropy_coefficient, or, with several "
        "algorithm.updates_per_step, a higher algorithm.clip_high (0.28).",
        at_end=True,
    ),
    "truncated completions": Rule(
        "completion/truncated_fraction",
        at_least(0.8, "{:.0%} of the completions hit the token limit.", steps=2),
        "Try a larger rollout.max_completion_tokens, check that the chat template lets the model stop, or penalize "
        "length with algorithm.overlong_buffer_fraction.",
        at_end=True,
    ),
    "throughput": Rule(
        "throughput/completion_tokens_per_second",
        throughput_drop,
        "Find the slow phase in timeline.json. Look for longer completions (completion/length_p95), other load on the "
        "machine, or a lost engine (logs/).",
        at_end=True,
    ),
    "staleness": Rule(
        "staleness/mean",
        stale_data,
        "Try more placement.trainer_devices and fewer placement.rollout_devices, or a smaller placement.max_staleness.",
    ),
    "discarded tokens": Rule(
        "rollout/discarded_fraction",
        at_least(0.2, "{:.0%} of the sampled tokens became too stale to train on.", steps=5),
        "Try a larger placement.max_staleness, or a smaller rollout.max_completion_tokens or "
        "rollout.max_inflight_groups.",
    ),
    "engine restarts": Rule(
        "recovery/engine_restarts",
        engine_restarted,
        "Its log under logs/ shows why it stopped. If it ran out of memory, try a smaller rollout.memory_fraction.",
    ),
    "reward failures": Rule(
        "reward/failed_fraction",
        at_least(0.05, "{:.0%} of the rewards so far, evaluations included, failed; their trajectories score 0."),
        "Every error is in logs/reward.log. If they timed out, try a larger reward.timeout_s or more reward.workers.",
    ),
    "failed episodes": Rule(
        "environment/failed_fraction",
        at_least(0.05, "{:.0%} of the episodes so far, evaluations included, failed and left their groups."),
        "Every error is in logs/environment.log. If steps were late, try a larger environment.timeout_s.",
    ),
    "tool calls": Rule(
        "environment/tool_failed_fraction",
        at_least(0.95, "{:.0%} of the tool calls failed.", steps=3),
        "Read samples/: the policy reads the errors after its calls. Check environment.tools, and that the model "
        "writes calls as its chat template says (data.template=chat).",
    ),
    "sequences of an episode": Rule(
        "environment/sequences_mean",
        at_least(4, "An episode is {:.1f} sequences on average, and each is computed with its whole history."),
        "If the chat template strips earlier reasoning, try environment.thinking=keep.",
        at_end=True,
        report_only=True,
    ),
    "waiting for environments": Rule(
        "environment/wait_fraction",
        at_least(
            0.8, "For {:.0%} of an episode's time no engine works for it: devices wait for the environments.", steps=3
        ),
        "Try more environment.workers, a larger algorithm.prompts_per_step, or placement=fully_async, where engines "
        "play other episodes meanwhile.",
        unless="idle/rollout",  # generation and training overlap: other episodes fill the gap
    ),
    "gradient not finite": Rule(
        "updates/skipped",
        at_least(1, "{:.0f} update(s) of the step were skipped: the gradient was not finite."),
        GRADIENT_ADVICE,
    ),
    "gradient norm": Rule(
        "grad_norm/max",
        at_least(100, "The gradient norm is up to {:.3g} before clipping."),
        GRADIENT_ADVICE,
        report_only=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """The metric of a rule at one step, and what is wrong with it."""

    value: float
    problem: str | None  # one sentence


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
        self._step: int | None = None
        self._active: set[str] = set()
        self._quiet_until: dict[str, int] = {}
        self._quiet_steps = dict.fromkeys(RULES, QUIET_STEPS)

    def check(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """Add a step or its evaluation. Return the alarms that it raises: name of the rule → problem and advice."""
        self._history.add(metrics, same_step=step == self._step)
        self._step = step
        problems = {
            name: reading.problem
            for name, reading in check_rules(self._history).items()
            if reading.problem is not None and not RULES[name].report_only
        }

        raised = {}
        for name, problem in problems.items():
            if name in self._active or step < self._quiet_until.get(name, step):
                continue
            self._quiet_until[name] = step + self._quiet_steps[name]
            self._quiet_steps[name] *= 4
            raised[name] = f"{problem} {RULES[name].advice}"

        self._active = set(problems)
        return raised

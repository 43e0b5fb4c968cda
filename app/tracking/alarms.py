"""What in a run's numbers should worry somebody, and what to try.

A rule looks at the steps so far and answers with a sentence or with None. Always: an alarm is raised when its rule
begins to hold, is silent while it goes on holding, and is not raised again for `QUIET_STEPS` steps, then for four times
as many, and so on. What was not measured raises nothing. Thresholds are generous: an alarm that cries over healthy runs
is read by nobody.

The list comes from what users of RL systems found out days too late (all rewards 0 because of a parser, weights that
never arrived, entropy gone, completions all cut off).
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

WINDOW = 30  # steps that rules look back
QUIET_STEPS = 20
Steps = Sequence[Mapping[str, float]]  # the last steps' metrics, newest last, at least one


@dataclass(frozen=True, slots=True)
class Alarm:
    name: str
    step: int
    what: str  # one sentence: what was seen
    advice: str  # one sentence: what to try

    @property
    def text(self) -> str:
        return f"step {self.step}: {self.what} {self.advice}"


class Alarms:
    """Feed it each step once, in order."""

    def __init__(self, *, max_staleness: int = 0) -> None:
        self._steps: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._rules: dict[str, tuple[Callable[[Steps], str | None], str]] = {
            **RULES,
            "staleness at its bound": (lambda steps: _stale(steps, max_staleness), STALE_ADVICE),
            "entropy collapse": (EntropyRule(), ENTROPY_ADVICE),
        }
        self._holding: set[str] = set()
        self._quiet_until: dict[str, int] = {}
        self._quiet_steps = dict.fromkeys(self._rules, QUIET_STEPS)

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms that this step raises."""
        self._steps.append(metrics)
        raised = []
        for name, (rule, advice) in self._rules.items():
            what = rule(self._steps)
            quiet = step < self._quiet_until.get(name, step)
            if what is not None and name not in self._holding and not quiet:
                self._quiet_until[name] = step + self._quiet_steps[name]
                self._quiet_steps[name] *= 4
                raised.append(Alarm(name, step, what, advice))
            (self._holding.discard if what is None else self._holding.add)(name)
        return raised


def last(steps: Steps, name: str, count: int) -> list[float]:
    """The metric in each of the last `count` steps; empty unless all of them have it."""
    values = [metrics.get(name) for metrics in list(steps)[-count:]]
    found = [float(value) for value in values if value is not None]
    return found if len(found) == count else []


def earlier(steps: Steps, name: str, skip: int) -> list[float]:
    """The finite values of the metric in the steps before the last `skip`."""
    values = [metrics.get(name) for metrics in list(steps)[:-skip]]
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def _no_spread(steps: Steps) -> str | None:
    fractions = last(steps, "reward/zero_std_fraction", 3)
    if not fractions or min(fractions) < 0.95:
        return None
    accuracy = last(steps, "reward/accuracy", 1)
    side = "" if not accuracy else " right" if accuracy[0] > 0.5 else " wrong"
    return f"In {fractions[-1]:.0%} of the groups all completions earn the same{side and f' (all{side})'}: no gradient."


def _mismatch(steps: Steps) -> str | None:
    """Only where nothing was stale: else the sampler was an older policy, and has to differ."""
    what = "The engine's and the trainer's log-probabilities differ"
    return None if _stale_now(steps) else _exploded(steps, "mismatch/kl", what, 1e-3, 0.1)


def _drift(steps: Steps) -> str | None:
    what = "The policy that is trained is far from those that sampled"
    return _exploded(steps, "mismatch/kl", what, 0.1, 0.3) if _stale_now(steps) else None


def _stale_now(steps: Steps) -> bool:
    return max(last(steps, "staleness/max", 1), default=0.0) > 0


def _kl(steps: Steps) -> str | None:
    reference = _exploded(steps, "kl/reference", "The policy has left the reference", 0.1, math.inf)
    return reference or _exploded(steps, "kl/old", "The updates of one step move the policy far", 0.1, math.inf)


def _exploded(steps: Steps, name: str, what: str, floor: float, limit: float) -> str | None:
    """Above `limit`, or above `floor` and ten times the median of the steps before."""
    now, before = last(steps, name, 1), earlier(steps, name, 1)
    if not now or not (now[0] > floor):
        return None
    usual = median(before) if len(before) >= 5 else math.inf
    if now[0] > limit or now[0] > 10 * usual:
        return f"{what}: {name} is {now[0]:.3g}{f', usually {usual:.2g}' if usual < math.inf else ''}."
    return None


class EntropyRule:
    """Entropy below a twentieth of what the first steps had, while many answers are wrong.

    Where the answers are right, low entropy is what learning looks like.
    """

    def __init__(self) -> None:
        self._first: list[float] = []

    def __call__(self, steps: Steps) -> str | None:
        now = last(steps, "entropy", 1)
        if not now or not math.isfinite(now[0]):
            return None
        if len(self._first) < 5:
            self._first.append(now[0])
            return None
        start, accuracy = fmean(self._first), last(steps, "reward/accuracy", 5)
        if now[0] < 0.05 * start and not (accuracy and fmean(accuracy) >= 0.7):
            return f"Entropy fell from {start:.3g} to {now[0]:.2g}: the policy hardly explores any more."
        return None


def _truncated(steps: Steps) -> str | None:
    fractions = last(steps, "completion/truncated_fraction", 2)
    if fractions and min(fractions) >= 0.95:
        return f"{fractions[-1]:.0%} of the completions end at the token limit."
    return None


def _slow(steps: Steps) -> str | None:
    name = "throughput/completion_tokens_per_second"
    now, before = last(steps, name, 3), earlier(steps, name, 3)
    if now and len(before) >= 10 and max(now) < 0.5 * median(before):
        return f"Throughput fell from {median(before):.0f} to {fmean(now):.0f} completion tokens per second."
    return None


def _stale(steps: Steps, max_staleness: int) -> str | None:
    means = last(steps, "staleness/mean", 5)
    if max_staleness > 0 and means and min(means) >= 0.9 * max_staleness:
        return f"Staleness is at its bound of {max_staleness}: engines wait for the trainer."
    return None


def _restarts(steps: Steps) -> str | None:
    counts = last(steps, "recovery/engine_restarts", 1)
    before = earlier(steps, "recovery/engine_restarts", 1)
    if counts and counts[0] > (before[-1] if before else 0):
        return f"An engine was restarted ({counts[0]:.0f} so far)."
    return None


def _failing(steps: Steps) -> str | None:
    fractions = last(steps, "reward/failed_fraction", 1)
    if fractions and fractions[0] >= 0.05:
        return f"The reward of {fractions[0]:.0%} of the trajectories failed or ran out of time (they score 0)."
    return None


def _not_finite(steps: Steps) -> str | None:
    norms = last(steps, "grad_norm", 1)
    return (
        f"The gradient norm is {norms[0]}: the update was skipped." if norms and not math.isfinite(norms[0]) else None
    )


STALE_ADVICE = "Try more placement.trainer_devices (fewer rollout_devices), or a smaller placement.max_staleness."
ENTROPY_ADVICE = (
    "Try a smaller trainer.lr, a higher algorithm.clip_high (0.28), rollout.temperature=1, or a small "
    "algorithm.entropy_coefficient."
)
RULES: dict[str, tuple[Callable[[Steps], str | None], str]] = {
    "groups without spread": (
        _no_spread,
        "Read samples/: if all are wrong, look at the reward's parsing and the prompt's format first, then try a "
        "larger algorithm.group_size or easier data; if all are right, harder data or algorithm.dynamic_sampling=true.",
    ),
    "mismatch": (
        _mismatch,
        "Try weight_sync.verify=always (did the weights arrive?), the same dtype in both, and algorithm.correction=tis "
        "or icepop.",
    ),
    "drift": (_drift, "Try a smaller trainer.lr or placement.max_staleness, or algorithm.correction=icepop."),
    "KL": (_kl, "Try a smaller trainer.lr, fewer algorithm.updates_per_step, or algorithm.kl=k3 with a coefficient."),
    "all completions truncated": (
        _truncated,
        "Try a larger rollout.max_completion_tokens, check that the chat template lets the model stop, or punish "
        "length with algorithm.overlong_buffer_tokens.",
    ),
    "throughput halved": (
        _slow,
        "Open timeline.json for the slow phase, look for longer completions (completion/length_p95), a busy machine, "
        "or an engine that was lost (logs/).",
    ),
    "engine restarts": (
        _restarts,
        "Its log under logs/ says why it ended; if it was memory, try a smaller rollout.memory_fraction.",
    ),
    "rewards failing": (
        _failing,
        "Try a larger reward.timeout_s or more reward.workers; logs/ has the first error.",
    ),
    "gradients not finite": (
        _not_finite,
        "Try a smaller trainer.lr; if it goes on, look at mismatch/max_ratio and the longest samples.",
    ),
}

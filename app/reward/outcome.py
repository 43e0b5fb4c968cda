"""The outcome of a reward call: one score per trajectory, or the failure.

Worker processes import this module at startup, so it imports nothing heavy.
"""

import asyncio
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from app.reward.component import MissingColumn, RewardFunction
from app.types import Trajectory
from app.utils.user_code import error_text


class FailureKind(Enum):
    """How a trajectory's reward can fail."""

    timeout = "timeout"  # the call exceeded the limit; its process was killed
    exception = "exception"  # the call raised
    value = "value"  # the call did not return one finite number per trajectory, or takes a column that rows lack
    died = "died"  # the worker process died on its own


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a value is missing."""

    kind: FailureKind
    message: str

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.message}"


@dataclass(frozen=True, slots=True)
class LoggedScore:
    """A score, and further numbers of the trajectory that the reward wants logged."""

    score: float
    logged: Mapping[str, float]


Value = float | LoggedScore | Failure | None  # None: the reward does not apply to the trajectory
Outcome = list[Value] | Failure  # a bare Failure: the whole call failed, because of at least one trajectory


def evaluate(reward: RewardFunction, trajectories: Sequence[Trajectory], runner: asyncio.Runner | None) -> Outcome:
    """Call a reward and validate its result; `runner` awaits the result of an async reward.

    The stack of what the reward raises goes to stderr.
    """
    try:
        result = reward(trajectories)
        if inspect.isawaitable(result):
            if runner is None:
                return Failure(FailureKind.exception, "an async reward was called without an event loop")
            result = runner.run(_await(result))
        return _validated(result, len(trajectories))
    except MissingColumn as error:
        return Failure(FailureKind.value, str(error))
    except (Exception, SystemExit) as error:  # custom code can raise anything
        return _raised(error)


def failures(outcome: Outcome) -> list[Failure]:
    """The failures in an outcome; one for a call that failed as a whole."""
    if isinstance(outcome, Failure):
        return [outcome]
    return [value for value in outcome if isinstance(value, Failure)]


def _raised(error: BaseException) -> Failure:
    traceback.print_exception(error, file=sys.stderr)
    return Failure(FailureKind.exception, error_text(error))


async def _await(result: Awaitable[Any]) -> Any:
    return await result


def _validated(result: Any, count: int) -> list[Value]:
    """Convert each result to a value; if the count is wrong, all are failures."""
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
        wrong_type = Failure(FailureKind.value, f"returned a {type(result).__name__}, not a list of {count} numbers")
        return [wrong_type] * count
    if len(result) != count:
        return [Failure(FailureKind.value, f"returned {len(result)} values for {count} trajectories")] * count
    return [_value(each) for each in result]


def _value(result: Any) -> Value:
    """Convert a result: a number, None, or a mapping of `score` and whatever else shall be logged."""
    if result is None:
        return None
    if not isinstance(result, Mapping):
        return _number(result)

    if "score" not in result:
        return Failure(FailureKind.value, f"returned a mapping of {', '.join(map(str, result))}, without score")
    score = _number(result["score"])
    if isinstance(score, Failure):
        return score

    numbers = {str(name): _number(value) for name, value in result.items() if name != "score"}
    return LoggedScore(score, {name: number for name, number in numbers.items() if isinstance(number, float)})


def _number(value: Any) -> float | Failure:
    if isinstance(value, BaseException):
        return _raised(value)
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return Failure(FailureKind.value, f"returned {str(value)[:50]!r}, a {type(value).__name__}, not a number")

    try:
        number = float(value)
    except Exception as error:  # an array of several numbers, an integer without bound, somebody's own type
        return Failure(FailureKind.value, f"returned a {type(value).__name__}, not a number ({error_text(error)})")
    return number if math.isfinite(number) else Failure(FailureKind.value, f"returned {number}, not a finite number")

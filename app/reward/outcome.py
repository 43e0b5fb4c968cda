"""What comes of calling a reward: a finite number for each trajectory, or what went wrong.

Imports nothing heavy: worker processes start with this module.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from app.reward.component import RewardFunction, error_text
from app.types import Trajectory


class FailureKind(Enum):
    """How a trajectory's reward can fail."""

    timeout = "timeout"  # the call took longer than the limit; its process was killed
    exception = "exception"  # the call raised
    value = "value"  # what it gave is not one finite number for each trajectory
    died = "died"  # its process ended by itself


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no value."""

    kind: FailureKind
    message: str

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.message}"


Value = float | Failure
Outcome = list[Value] | Failure  # a Failure alone: the call as a whole failed, on behalf of one of its trajectories


def evaluate(reward: RewardFunction, trajectories: Sequence[Trajectory], runner: asyncio.Runner | None) -> Outcome:
    """Call a reward and check what it gives; `runner` awaits what an async one gives."""
    try:
        given = reward(trajectories)
        if inspect.isawaitable(given):
            if runner is None:
                return Failure(FailureKind.exception, "an async reward was called where nothing can await it")
            given = runner.run(_awaited(given))
        return _checked(given, len(trajectories))
    except (Exception, SystemExit) as error:  # a user's own code raises anything
        return Failure(FailureKind.exception, error_text(error))


async def _awaited(given: Awaitable[Any]) -> Any:
    return await given


def _checked(given: Any, count: int) -> list[Value]:
    """Each value as a float or a failure; all of them failures when the count is wrong."""
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__len__") or not hasattr(given, "__iter__"):
        wrong = Failure(FailureKind.value, f"it gave a {type(given).__name__}, not a list of {count} numbers")
        return [wrong] * count
    if len(given) != count:
        return [Failure(FailureKind.value, f"it gave {len(given)} values for {count} trajectories")] * count
    return [_number(value) for value in given]


def _number(value: Any) -> Value:
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return Failure(FailureKind.value, f"it gave {str(value)[:50]!r}, a {type(value).__name__}, not a number")
    number = float(value)
    return number if math.isfinite(number) else Failure(FailureKind.value, f"it gave {number}, not a finite number")

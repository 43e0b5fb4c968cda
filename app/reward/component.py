"""Reward components: a name, a weight, the dotted path of the code, and what a call of it returns.

Built-in and custom components are both resolved by dotted path, so there is a single mechanism. Worker processes
import this module at startup, so it imports nothing heavy.

The names of its parameters decide which of four signatures a custom reward has:

    (trajectories)               a list, the completions of one prompt       returns a score for each
    (trajectory)                 one of them                                 returns its score
    (prompts, completions, …)    lists of texts, of conversations lists of messages, and of every column by name
                                                                             returns a score for each
    (solution_str, …)            one of them, as in verl                     returns its score
"""

import asyncio
import functools
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from app.types import Trajectory
from app.utils.user_code import LoadError, error_text, resolve

Scores = Sequence[Any]  # numbers; in place of one, the exception that its trajectory raised
RewardFunction = Callable[[Sequence[Trajectory]], Scores | Awaitable[Scores]]
# Copies, and string operations linear in the text: they cannot hang, so they need no worker.
IN_PROCESS = ("exact", "format", "environment")
BUILT_IN_TIMEOUT_S = 5.0  # per trajectory; a judge needs more, a comparison of two answers does not
KILL_MARGIN_S = 5.0  # of `code`, which ends its programs at `reward.timeout_s` itself
COLUMN_PARAMETERS = ("prompts", "completions", "completion_ids")
SIGNATURES = (
    "(trajectories)",
    "(trajectory)",
    "(prompts, completions, **columns)",
    "(data_source, solution_str, ground_truth, extra_info)",
)


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


class MissingColumn(Exception):
    """A reward takes a column that the rows do not have."""


@dataclass(frozen=True, slots=True)
class RewardComponent:
    """One term of the weighted sum."""

    name: str  # its values are logged under this name
    weight: float
    target: str  # dotted path of a function or class
    args: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None  # the setting that names a custom one; None: built in
    per_trajectory: bool = False  # one trajectory per call, so that a hanging one costs the timeout only once
    isolated: bool = True  # runs in worker processes

    def deadline_s(self, timeout_s: float) -> float:
        """Return the seconds per trajectory after which a worker is killed, of `reward.timeout_s`."""
        if self.key is not None:
            return timeout_s
        return timeout_s + KILL_MARGIN_S if self.args else min(timeout_s, BUILT_IN_TIMEOUT_S)

    def load(self) -> RewardFunction:
        """Import the target: a class is made with `args`, a function gets them on each call. Raises `LoadError`."""
        target = resolve(self.target)
        try:
            if inspect.isclass(target):
                return _of_trajectories(target(**self.args), {})
            return _of_trajectories(functools.partial(target, **self.args), self.args)
        except LoadError:
            raise
        except Exception as error:  # custom constructors can raise anything
            called = f"it cannot be constructed or called with {dict(self.args)}"
            raise LoadError(f"{called} ({error_text(error)})") from error


def built_in(name: str, weight: float, args: Mapping[str, Any] | None = None) -> RewardComponent:
    """Return the built-in component `name`: the function of that name in the module of that name in this package."""
    target = f"{__package__}.{name}.{name}"
    return RewardComponent(name, weight, target, args or {}, per_trajectory=True, isolated=name not in IN_PROCESS)


def evaluate(reward: RewardFunction, trajectories: Sequence[Trajectory], runner: asyncio.Runner | None) -> Outcome:
    """Call a reward and validate its result; `runner` awaits the result of an async reward.

    The stack of what the reward raises goes to stderr.
    """
    try:
        result = reward(trajectories)
        if inspect.isawaitable(result):
            assert runner is not None  # rewards in this process are built in, and none of them is async
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
    except Exception as error:  # an array of several numbers, an integer without bound, a type of the user's
        return Failure(FailureKind.value, f"returned a {type(value).__name__}, not a number ({error_text(error)})")
    return number if math.isfinite(number) else Failure(FailureKind.value, f"returned {number}, not a finite number")


def _of_trajectories(reward: Any, args: Mapping[str, Any]) -> RewardFunction:
    """Return a reward of any of the four signatures as a function of a list of trajectories.

    `args` are bound already: columns of the same name do not replace them. Raises `LoadError` for another signature.
    """
    signature = inspect.signature(reward)
    names = list(signature.parameters)

    if any(name in names for name in COLUMN_PARAMETERS):
        return _of_columns(reward, args)
    if "solution_str" in names:
        return _of_one(_of_solution(reward, args))

    try:
        signature.bind(None)
    except TypeError as error:
        raise LoadError(f"its parameters are ({', '.join(names)}): write {' or '.join(SIGNATURES)}") from error
    return _of_one(reward) if names[0] == "trajectory" else reward


def _of_solution(reward: Any, args: Mapping[str, Any]) -> Callable[[Trajectory], Any]:
    """Return a reward with the parameters of verl's `compute_score` as a function of one trajectory."""
    accepted = _accepted(reward)

    def call(trajectory: Trajectory) -> Any:
        row = trajectory.prompt.row
        available = {
            "data_source": row.get("data_source", trajectory.prompt.source),
            "solution_str": trajectory.text,
            "ground_truth": trajectory.prompt.answer,
            "extra_info": row.get("extra_info"),
        }
        return reward(**{name: value for name, value in available.items() if name not in args and accepted(name)})

    return call


def _accepted(reward: Any) -> Callable[[str], bool]:
    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return lambda name: takes_all or name in named


def _of_one(reward: Any) -> RewardFunction:
    """Call the reward for each trajectory; an async one for all of them concurrently. Each can fail on its own."""

    def call(trajectories: Sequence[Trajectory]) -> Scores | Awaitable[Scores]:
        results = [_attempt(reward, trajectory) for trajectory in trajectories]
        return _gather(results) if any(map(inspect.isawaitable, results)) else results

    return call


def _attempt(reward: Any, trajectory: Trajectory) -> Any:
    try:
        return reward(trajectory)
    except Exception as error:  # custom code can raise anything
        return error


async def _gather(results: Sequence[Any]) -> Scores:
    async def value(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    return await asyncio.gather(*map(value, results), return_exceptions=True)


def _of_columns(reward: Any, args: Mapping[str, Any]) -> RewardFunction:
    """Call the reward with lists as keywords: `prompts`, `completions`, `completion_ids` and every column of the rows.

    A reward without `**kwargs` gets the columns that it names.
    """
    accepted = _accepted(reward)
    parameters = inspect.signature(reward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.kind not in variadic and each.default is each.empty]

    def call(trajectories: Sequence[Trajectory]) -> Scores | Awaitable[Scores]:
        available = {name: values for name, values in columns(trajectories).items() if name not in args}
        missing = [name for name in required if name not in available]
        if missing:
            raise MissingColumn(f"it takes {', '.join(missing)}; there are {', '.join(available)}")
        return reward(**{name: values for name, values in available.items() if accepted(name)})

    return call


def columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return questions, completions and every column of the rows as lists, one entry per trajectory.

    `answer` is the column of that name, else the reference answer. Of a conversation, prompt and completion are lists
    of messages, as in TRL.
    """
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.prompt.row)
    return {
        "answer": [trajectory.prompt.answer for trajectory in trajectories],
        **{name: [trajectory.prompt.row.get(name) for trajectory in trajectories] for name in names},
        "prompts": [list(each.prompt.messages) or each.prompt.question for each in trajectories],
        "completions": [
            [{"role": "assistant", "content": each.text}] if each.prompt.messages else each.text
            for each in trajectories
        ],
        "completion_ids": [trajectory.completion.token_ids.tolist() for trajectory in trajectories],
    }

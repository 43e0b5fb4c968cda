"""Reward components: a name, a weight, and the dotted path of the code.

Built-in and custom components are both resolved by dotted path, so there is a single mechanism. Worker processes
import this module at startup, so it imports nothing heavy.

A custom reward has one of three signatures, told apart by the names of its parameters:

    (trajectories)               a list, the completions of one prompt       returns a number for each
    (trajectory)                 one of them                                 returns its number
    (prompts, completions, …)    lists of texts, and of every column by name returns a number for each
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.types import Trajectory
from app.utils.dotted_path import LoadError, error_text, resolve

Scores = Sequence[Any]  # numbers; in place of one, the exception that its trajectory raised
RewardFunction = Callable[[Sequence[Trajectory]], Scores | Awaitable[Scores]]
# Copies, and string operations linear in the text: they cannot hang, so they need no worker.
IN_PROCESS = ("exact", "format", "environment")
BUILT_IN_LIMIT_S = 5.0  # per trajectory; a judge needs more, a comparison of two answers does not
COLUMN_PARAMETERS = ("prompts", "completions", "completion_ids")


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

    def load(self) -> RewardFunction:
        """Import the target. A class is instantiated with `args`; a function receives them on each call.

        Raises:
            LoadError: The target cannot be imported, constructed, or called with trajectories.
        """
        target = resolve(self.target)
        try:
            if inspect.isclass(target):
                return _of_trajectories(target(**self.args), {})
            return _of_trajectories(functools.partial(target, **self.args), self.args)
        except Exception as error:  # custom constructors can raise anything
            raise LoadError(
                f"it cannot be constructed or called with {dict(self.args)} ({error_text(error)})"
            ) from error


def built_in(name: str, weight: float) -> RewardComponent:
    """Return the built-in component `name`: the function of that name in the module of that name in this package."""
    target = f"{__package__}.{name}.{name}"
    return RewardComponent(name, weight, target, per_trajectory=True, isolated=name not in IN_PROCESS)


def custom(
    target: str,
    args: Mapping[str, Any],
    *,
    name: str | None = None,
    weight: float = 1.0,
    key: str = "reward._target_",
) -> RewardComponent:
    """Return the component for a custom reward; without a name it is named after its function or class."""
    return RewardComponent(name or target.rpartition(".")[2], weight, target, dict(args), key)


def _of_trajectories(reward: Any, args: Mapping[str, Any]) -> RewardFunction:
    """Return a reward of any of the three signatures as a function of a list of trajectories.

    Args:
        reward: A callable with its arguments bound.
        args: Those arguments, which columns of the same name do not replace.
    """
    signature = inspect.signature(reward)
    names = list(signature.parameters)

    if any(name in names for name in COLUMN_PARAMETERS):
        return _of_columns(reward, args)
    if names[:1] == ["trajectory"]:
        signature.bind(None)
        return _of_one(reward)

    signature.bind([])
    return reward


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
    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    required = [each.name for each in parameters if each.name in named and each.default is each.empty]

    def call(trajectories: Sequence[Trajectory]) -> Scores | Awaitable[Scores]:
        available = {name: values for name, values in columns(trajectories).items() if name not in args}
        missing = [name for name in required if name not in available]
        if missing:
            raise MissingColumn(f"it takes {', '.join(missing)}; there are {', '.join(available)}")
        return reward(**{name: values for name, values in available.items() if takes_all or name in named})

    return call


def columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return questions, completions and every column of the rows as lists, one entry per trajectory.

    `answer` is the column of that name; in rows without one, the reference answer.
    """
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.prompt.row)
    return {
        "answer": [trajectory.prompt.answer for trajectory in trajectories],
        **{name: [trajectory.prompt.row.get(name) for trajectory in trajectories] for name in names},
        "prompts": [trajectory.prompt.question for trajectory in trajectories],
        "completions": [trajectory.text for trajectory in trajectories],
        "completion_ids": [trajectory.completion.token_ids.tolist() for trajectory in trajectories],
    }

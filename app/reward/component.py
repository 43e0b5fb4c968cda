"""Reward components: a name, a weight, and the dotted path of the code.

Built-in and custom components are both resolved by dotted path, so there is a single mechanism. Worker processes
import this module at startup, so it imports nothing heavy.
"""

import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.types import Trajectory

Scores = Sequence[float]
RewardFunction = Callable[[Sequence[Trajectory]], Scores | Awaitable[Scores]]
IN_PROCESS = ("exact", "format")  # string operations linear in the text: they cannot hang, so they need no worker


class LoadError(Exception):
    """A component cannot be imported or constructed. The message completes a sentence that names the component."""


@dataclass(frozen=True, slots=True)
class RewardComponent:
    """One term of the weighted sum."""

    name: str  # its values are logged under this name
    weight: float
    target: str  # dotted path of a function or class
    args: Mapping[str, Any] = field(default_factory=dict)
    per_trajectory: bool = False  # one trajectory per call, so that a hanging one costs the timeout only once
    isolated: bool = True  # runs in worker processes

    def load(self) -> RewardFunction:
        """Import the target. A class is instantiated with `args`; a function receives them on each call.

        Raises:
            LoadError: The target cannot be imported, constructed, or called with a list of trajectories.
        """
        target = _resolve(self.target)
        try:
            reward: Any = target(**self.args) if inspect.isclass(target) else functools.partial(target, **self.args)
            inspect.signature(reward).bind([])
        except Exception as error:  # custom constructors can raise anything
            raise LoadError(
                f"it cannot be constructed or called with {dict(self.args)} ({error_text(error)})"
            ) from error
        return reward


def built_in(name: str, weight: float) -> RewardComponent:
    """Return the built-in component `name`: the function of that name in the module of that name in this package."""
    target = f"{__package__}.{name}.{name}"
    return RewardComponent(name, weight, target, per_trajectory=True, isolated=name not in IN_PROCESS)


def custom(target: str, args: Mapping[str, Any]) -> RewardComponent:
    """Return the component for a custom reward, named after its function or class."""
    return RewardComponent(target.rpartition(".")[2], 1.0, target, dict(args))


def _resolve(target: str) -> Callable[..., Any]:
    """Import the function or class at `package.module.name`, or deeper: `package.module.Class.method`."""
    names = target.split(".")
    for split in range(len(names) - 1, 0, -1):
        module_name = ".".join(names[:split])
        try:
            resolved: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # a shorter prefix may be the module
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise LoadError(f"module {module_name} needs a module that is missing ({error})") from error
        except Exception as error:  # custom modules can raise anything
            raise LoadError(f"module {module_name} cannot be imported ({error_text(error)})") from error

        for name in names[split:]:
            if not hasattr(resolved, name):
                raise LoadError(f"module {module_name} has no {'.'.join(names[split:])}")
            resolved = getattr(resolved, name)
        if not callable(resolved):
            raise LoadError("it is not a function or class")
        return resolved

    raise LoadError(f"there is no module {'.'.join(names[:-1])} (searched the working directory and PYTHONPATH)")


def error_text(error: BaseException) -> str:
    """Return type, first line and source location of an error, short enough for a sentence."""
    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{text} at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else text

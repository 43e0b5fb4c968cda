"""A part of the reward: its name, its weight, and where its code is.

Built-in parts and a user's own are found the same way, by a dotted path, so that there is one mechanism.
Imports nothing heavy: worker processes start with this module.
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
INSTANT = ("exact", "format")  # plain string work, linear in the text: cannot hang, so it needs no process of its own


class LoadError(Exception):
    """A part cannot be found or made; the message completes a sentence that names the part."""


@dataclass(frozen=True, slots=True)
class RewardComponent:
    """One term of the weighted sum."""

    name: str  # under which its values are logged
    weight: float
    target: str  # dotted path of a function or class
    args: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False  # called with one trajectory at a time, so that one that hangs costs the time limit once
    isolated: bool = True  # runs in worker processes

    def load(self) -> RewardFunction:
        """Import the target; a class is made with `args`, a function gets them at each call. Raises `LoadError`."""
        found = _find(self.target)
        try:
            made: Any = found(**self.args) if inspect.isclass(found) else functools.partial(found, **self.args)
            inspect.signature(made).bind([])
        except Exception as error:  # a user's own constructor raises anything
            raise LoadError(f"it cannot be made or called with {dict(self.args)} ({error_text(error)})") from error
        return made


def built_in(name: str, weight: float) -> RewardComponent:
    """The part whose code is the function of its name, in the module of its name in this package."""
    return RewardComponent(name, weight, f"{__package__}.{name}.{name}", alone=True, isolated=name not in INSTANT)


def own(target: str, args: Mapping[str, Any]) -> RewardComponent:
    """A user's own reward."""
    return RewardComponent(target.rpartition(".")[2], 1.0, target, dict(args))


def _find(target: str) -> Callable[..., Any]:
    """The function or class at a dotted path `package.module.name`, or deeper: `package.module.Class.method`."""
    names = target.split(".")
    for split in range(len(names) - 1, 0, -1):
        module_name = ".".join(names[:split])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue  # a shorter path may be the module
            raise LoadError(f"module {module_name} needs a module that is missing ({error})") from error
        except Exception as error:  # the code of a user's own module raises anything
            raise LoadError(f"module {module_name} cannot be imported ({error_text(error)})") from error
        for name in names[split:]:
            if not hasattr(found, name):
                raise LoadError(f"module {module_name} has no {'.'.join(names[split:])}")
            found = getattr(found, name)
        if not callable(found):
            raise LoadError("it is not a function or class")
        return found
    raise LoadError(f"there is no module {'.'.join(names[:-1])} (it must be in this folder or on PYTHONPATH)")


def error_text(error: BaseException) -> str:
    """Kind, first line and place of an error, short enough for a sentence."""
    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{text} at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else text

"""`environment._target_`: your own environment, a class with `run`, or one with `begin` and `step`.

    class Guess:                                   # python -m app environment._target_=my_envs.Guess reward=environment
        def begin(self, task):                     # what the policy reads first; None: the data's own question
            self.secret, self.found = int(task.answer), False
        def step(self, reply):                     # a str or messages: the episode continues; None: it ends
            if not reply.text.strip().isdigit():
                return "a number, please"          # a reply is never a failure
            guess = int(reply.text)
            self.found = guess == self.secret
            return None if self.found else "higher" if guess < self.secret else "lower"
        def score(self):                           # optional: a number, or numbers by name (the first is the score)
            return float(self.found)
        def close(self): ...                       # optional, called once in any case

Any method may be async. One instance serves one episode, and its plain methods run in one thread.
"""

import functools
import inspect
import json
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from app.environment.protocol import EpisodeOver, Message, Policy, Task
from app.utils.user_code import LoadError, resolve

Call = Callable[..., Awaitable[Any]]  # a method and its arguments → what it returns
METHODS = {"run": (None, None), "begin": (None,), "step": (None,), "score": (), "close": ()}  # and their arguments
SHAPE = "give it `run(self, task, policy)`, or `begin(self, task)` and `step(self, reply)`"


def make(settings: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the function that makes an environment for each episode, of `target` with `args`. Raises `LoadError`."""
    target = resolve(settings["target"])
    args = dict(settings.get("args") or {})
    try:
        inspect.signature(target).bind(**args)
    except ValueError:
        pass  # of C, without a signature
    except TypeError as error:
        raise LoadError(f"it does not take environment.args={json.dumps(args)} ({error})") from error

    if inspect.isclass(target):
        check_methods(target)
        if settings.get("scored") and not (hasattr(target, "run") or hasattr(target, "score")):
            raise LoadError("it has no `score(self)`, which reward=environment takes")
    return functools.partial(target, **args)


def check_methods(environment: Any) -> None:
    """Check an environment, or its class. Raises `LoadError` if methods are missing or take other arguments."""
    if not (hasattr(environment, "run") or (hasattr(environment, "begin") and hasattr(environment, "step"))):
        raise LoadError(f"it is no environment: {SHAPE}")

    of_class = (None,) if inspect.isclass(environment) else ()  # self
    for name, arguments in METHODS.items():
        method = getattr(environment, name, None)
        if method is None:
            continue
        if not callable(method):
            raise LoadError(f"its {name} is not a method: {SHAPE}")
        static = isinstance(inspect.getattr_static(environment, name), staticmethod | classmethod)
        try:
            inspect.signature(method).bind(*(() if static else of_class), *arguments)
        except TypeError as error:
            raise LoadError(f"its {name}{inspect.signature(method)} cannot be called ({error}): {SHAPE}") from error


async def run_steps(environment: Any, call: Call, task: Task, policy: Policy) -> Any:
    """Alternate policy and environment until `step` returns None or a limit is hit; return its score, None without.

    `call` calls methods of the environment, plain or async.
    """
    conversation = messages_of(await call(environment.begin, task), "begin")
    try:
        reply = await policy(conversation)
        while (observation := messages_of(await call(environment.step, reply), "step")) is not None:
            conversation = [*(conversation or ()), reply.message, *observation]
            reply = await policy(conversation)
    except EpisodeOver:
        pass  # the policy has noted which limit it was
    return await score_of(environment, call)


async def score_of(environment: Any, call: Call) -> Any:
    """Return what the environment's `score` returns, None without one."""
    score = getattr(environment, "score", None)
    return None if score is None else await call(score)


class WrongValue(Exception):
    """A method of an environment returned something that it must not. The message is a sentence without its period."""


def messages_of(value: Any, method: str) -> list[Message] | None:
    """Return what `begin` or `step` returned as messages, None as None. Raises `WrongValue` for anything else."""
    if value is None:
        return None
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Sequence) and value and all(_is_message(each) for each in value):
        return list(value)
    if _is_message(value):
        return [value]
    raise WrongValue(f"{method} returned {short(value)}; give a str, a list of messages with role and content, or None")


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and "content" in value


def short(value: Any) -> str:
    """Return a value for a sentence: its type, and its beginning.

    >>> short({1})
    'a set ({1})'
    """
    try:
        text = repr(value)
    except Exception:  # it may be anything
        text = "..."
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    article = "an" if type(value).__name__[0] in "aeiouAEIOU" else "a"
    return f"{article} {type(value).__name__} ({shown})"


def scores_of(value: Any) -> dict[str, float]:
    """Return what `run` or `score` returned as finite numbers by name, none for None. Raises `WrongValue` otherwise."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _number(each, f"the score {name} is") for name, each in value.items()}
    return {"score": _number(value, "the score is")}


def _number(value: Any, subject: str) -> float:
    number = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value  # numpy, torch
    if not isinstance(number, numbers.Real):
        raise WrongValue(f"{subject} {short(value)}; give a number, numbers by name, or None")
    if not math.isfinite(number):
        raise WrongValue(f"{subject} {float(number)}; give a finite number")
    return float(number)

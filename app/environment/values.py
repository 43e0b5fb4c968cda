"""What the methods of an environment return, checked: observations and scores."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from app.environment.protocol import Message


class WrongValue(Exception):
    """A method of an environment returned something that it must not. The message is a sentence without its period."""


def messages_of(value: Any, method: str) -> list[Message] | None:
    """Return what `begin` or `step` returned as messages; None stays None.

    Raises:
        WrongValue: It is something else.
    """
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
    """Return what `run` or `score` returned as numbers by name; None gives none.

    Raises:
        WrongValue: It is something else, or a number is not finite.
    """
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

r"""Reward component `format`: 1 if the completion marks a final answer with `\boxed{…}` or `#### …`; else 0.

Reasoning, up to the last `</think>`, is left out. Completions are untrusted, so extraction is linear in the length of
the text.
"""

import re
from collections.abc import Sequence

from app.types import Trajectory

BOXED = r"\boxed{"
HASHES = re.compile(r"####[ \t]*([^\n]*)")
REASONING_END = "</think>"
# A statement, also as a display formula on lines of its own. Its length is bounded: the search stays linear.
STATED = re.compile(r"(?i:\banswer[\s*]*(?:is\b|:))[\s:*]*(\\\[[^\[\]]{0,500}\\\]|\$\$[^$]{0,500}\$\$|[^\n]+)")
PHRASE = re.compile(r"[^\W\d_]{2} +[^\W\d_]{2}")
BEGINS_WITH_VALUE = re.compile(r"\W*\d")
ENDS_OF_VALUES = (*"0123456789$%)}]",)
# What stands after #### in markdown, and is no answer.
HEADING = re.compile(
    r"(?i)\W*(?:(?:step|part|case|phase|method|approach|section)\b|\d+[.):]\s+[^\W\d]|"
    r"(?:(?:the|final|my) )*(?:answer|solution|conclusion|result|check|verification|explanation|reasoning)\b\W*$)"
)


def format(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return 0 or 1 per trajectory."""
    return [float(_marks_answer(trajectory.text)) for trajectory in trajectories]


def extract_final_answer(text: str) -> str | None:
    r"""Return the marked final answer, stripped; None if there is no marker (\boxed{} or ####) or it is empty.

    >>> extract_final_answer(r"so it is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_final_answer("2 + 2 = 4\n#### 4")
    '4'
    """
    text = text.rpartition(REASONING_END)[2]
    if boxed := _boxed(text):
        return boxed
    # "The answer is based on …" states nothing.
    stated = max((found.start() for found in STATED.finditer(text) if not PHRASE.search(found[1])), default=-1)
    mark = _last_mark(text)
    return mark[1].strip() or None if mark is not None and mark.end() > stated else None


def _marks_answer(text: str) -> bool:
    text = text.rpartition(REASONING_END)[2]
    mark = _last_mark(text)
    return _boxed(text) is not None or (mark is not None and bool(mark[1].strip()))


def _last_mark(text: str) -> re.Match[str] | None:
    """Return the last `#### …` that is no heading: a phrase above further numbers, unless a value begins or ends it."""
    last_digit = max((found.end() for found in re.finditer(r"\d", text)), default=0)
    for found in reversed([*HASHES.finditer(text)]):
        has_value = BEGINS_WITH_VALUE.match(found[1]) or found[1].rstrip(" \t*_.:,!").endswith(ENDS_OF_VALUES)
        is_title = found.end() < last_digit and PHRASE.search(found[1]) and not has_value
        if not is_title and not HEADING.match(found[1]):
            return found
    return None


def _boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{`, up to its closing brace; None if the brace is never closed."""
    start = text.rfind(BOXED)
    if start < 0:
        return None

    start += len(BOXED)
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start:position].strip() or None
    return None

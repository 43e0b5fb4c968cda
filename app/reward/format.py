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
STATED = re.compile(r"(?i:\banswer\s*(?:is\b|:))[\s:*]*([^\n]+)")
# What stands after #### in markdown, and is no answer.
HEADING = re.compile(
    r"(?i)\W*(?:(?:step|part|case|phase|method|approach|section)\b|\d+[.):]\s+[^\W\d]|"
    r"(?:(?:the|final|my) )*(?:answer|solution|conclusion|result|check|verification|explanation|reasoning)\b\W*$)"
)


def format(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return 0 or 1 per trajectory."""
    return [float(extract_final_answer(trajectory.text) is not None) for trajectory in trajectories]


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
    stated = max((found.start() for found in STATED.finditer(text)), default=-1)
    marks = [found for found in HASHES.finditer(text) if found.end() > stated and not HEADING.match(found[1])]
    return marks[-1][1].strip() or None if marks else None


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

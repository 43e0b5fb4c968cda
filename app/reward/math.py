r"""Part `math`: 1 where math-verify finds the completion's final answer equal to the reference; else 0.

The final answer is the last `\boxed{…}`, else what follows the last `####`, else what math-verify finds at the text's
end ("the answer is …", a last number). Words are compared as words: as mathematics, "Paris" would equal "sPiar".

Always holds: both sides are parsed by the same rules. math-verify's own time limits (signal.alarm, which cannot
interrupt one long operation) are off: this runs in a worker process that is killed when it takes too long.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from app.reward.answer import extract_final_answer
from app.types import Trajectory

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warning that no time limit is set

TAIL = 1000  # characters at the end of a text where an unmarked answer is looked for
ORNAMENT = " \t\n.,;:$"  # around an answer, without meaning


def math(trajectories: Sequence[Trajectory]) -> list[float]:
    """One value, 0 or 1, for each trajectory. `ValueError` where the reference answer itself says nothing."""
    return [float(equal(trajectory.prompt.answer, trajectory.text)) for trajectory in trajectories]


def equal(reference: str, text: str) -> bool:
    """Whether the final answer of `text` is that of `reference`, which may be marked or stand alone."""
    expected, given = _clean(extract_final_answer(reference) or reference), extract_final_answer(text)
    if not expected:
        raise ValueError(f"the reference answer {reference!r} says nothing")
    if given is not None and _clean(given) == expected:
        return True
    if expected.replace(" ", "").isalpha() and len(expected) > 1:
        return given is not None and _clean(given).casefold() == expected.casefold()
    gold = _parsed_reference(expected)
    if given is None:
        return verify(gold, parse(text[-TAIL:], parsing_timeout=None), timeout_seconds=None)
    if verify(gold, _parse_marked(_clean(given)), timeout_seconds=None):
        return True
    # after #### people write "18 dollars": there the last number counts; a box holds the answer and nothing else
    return "\\boxed" not in text and verify(gold, parse(given, parsing_timeout=None), timeout_seconds=None)


@lru_cache(maxsize=1024)
def _parsed_reference(expected: str) -> list[Any]:
    """Parsed once for all completions of a prompt."""
    return _parse_marked(expected)


def _parse_marked(answer: str) -> list[Any]:
    """What math-verify makes of a whole answer: its expression and its text."""
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)


def _clean(answer: str) -> str:
    r"""The answer without ornament: `$\text{Paris}$.` → `Paris`, `50\%` → `50`."""
    answer = answer.strip(ORNAMENT).removesuffix("%").removesuffix("\\")
    if answer.startswith("\\text{") and answer.endswith("}") and answer.count("{") == 1:
        answer = answer[len("\\text{") : -1]
    return answer.strip(ORNAMENT)


equal("1", "\\boxed{2}")  # math-verify builds its tables at the first use: while the worker starts, not on its clock

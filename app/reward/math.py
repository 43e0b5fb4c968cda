r"""Reward component `math`: 1 if math-verify finds the completion's final answer equal to the reference; else 0.

The final answer is the last `\boxed{…}`, else the text after the last `####`, else what math-verify finds at the end of
the text ("the answer is …", a last number). Words are compared as words: as mathematics, "Paris" would equal "sPiar".

Invariants:
- Both sides are parsed by the same rules.
- math-verify's own timeouts are off: they use signal.alarm, which cannot interrupt one long operation. This code runs
  in a worker process that is killed on timeout.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from app.reward.answer import extract_final_answer
from app.types import Trajectory

logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences its warning that no timeout is set

TAIL = 1000  # characters at the end of a text that are searched for an unmarked answer
PADDING = " \t\n.,;:$"  # characters around an answer without meaning


def math(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return 0 or 1 per trajectory. Raises `ValueError` if the reference answer is empty."""
    return [float(equal(trajectory.prompt.answer, trajectory.text)) for trajectory in trajectories]


def equal(reference: str, text: str) -> bool:
    """Whether the final answer of `text` equals that of `reference`, which may be marked or bare."""
    expected = _clean(extract_final_answer(reference) or reference)
    if not expected:
        raise ValueError(f"the reference answer {reference!r} is empty")

    marked = extract_final_answer(text)
    if marked is not None and _clean(marked) == expected:
        return True
    if expected.replace(" ", "").isalpha() and len(expected) > 1:
        return marked is not None and _clean(marked).casefold() == expected.casefold()

    gold = _parsed_reference(expected)
    if marked is None:
        return verify(gold, parse(text[-TAIL:], parsing_timeout=None), timeout_seconds=None)
    if verify(gold, _parse_marked(_clean(marked)), timeout_seconds=None):
        return True

    # After ####, people write "18 dollars": the last number counts. A box holds the answer and nothing else.
    return "\\boxed" not in text and verify(gold, parse(marked, parsing_timeout=None), timeout_seconds=None)


@lru_cache(maxsize=1024)
def _parsed_reference(expected: str) -> list[Any]:
    """Parse the reference once for all completions of a prompt."""
    return _parse_marked(expected)


def _parse_marked(answer: str) -> list[Any]:
    """Parse a whole answer with math-verify, into its expression and its text."""
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)


def _clean(answer: str) -> str:
    r"""Strip an answer of padding and wrappers: `$\text{Paris}$.` → `Paris`, `50\%` → `50`."""
    answer = answer.strip(PADDING).removesuffix("%").removesuffix("\\")
    if answer.startswith("\\text{") and answer.endswith("}") and answer.count("{") == 1:
        answer = answer[len("\\text{") : -1]
    return answer.strip(PADDING)


# math-verify builds its tables on first use: do it while the worker starts, outside of any call's timeout
equal("1", "\\boxed{2}")

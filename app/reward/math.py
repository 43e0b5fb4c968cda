r"""Reward component `math`: 1 if math-verify finds the completion's final answer equal to the reference; else 0.

The final answer is the last `\boxed{…}`, else the text after the last `####` that is no heading, else what follows the
last "answer is", else all of the text if that is the reference, else what math-verify finds at the end of the text (a
last number). Reasoning, up to the last `</think>`, is left out. Words are compared as words: as mathematics, "Paris"
would equal "sPiar". So are dates, times and ranges: `3-5` would be -2.

Invariants:
- Both sides are parsed by the same rules.
- math-verify's own timeouts are off: they use signal.alarm, which cannot interrupt one long operation. This code runs
  in a worker process that is killed on timeout.
"""

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from app.reward.format import REASONING_END, STATED, extract_final_answer
from app.types import Trajectory

logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences its warning that no timeout is set

TAIL = 1000  # characters at the end of a text that are searched for an unmarked answer

# Characters around an answer without meaning. A point is one only at the end: .5 is not 5.
LEADING = " \t\n,;:*"
TRAILING = LEADING + "."
WRAPPER = re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}")
# 2,125 in 2,1250: math-verify reads no further than whole groups of thousands.
CUT = re.compile(r"(?<![\d,.])\d{1,3}+(?:,\d{3})++(?=,?\d)")
WORD = re.compile(r"[^\W\d_]{2,}")
WITH_UNIT = re.compile(r"([-+]?[\d.,/]+)((?: [^\W\d_]{3,}| cm| ft| kg| km| lb| mg| mm| oz)+)")
# A unit behind a number, at the end: in \text with its power, or plain
UNIT = re.compile(
    r"(?:[\d}]|\\circ)(?:\\[,;! ]|[~\s])*(?:\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}|"
    r"((?: ?\b[^\W\d_]{3,}| ?(?:cm|ft|kg|km|lb|mg|mm|oz)\b| [ghlms]\b|(?<=circ) ?[CF])+))\s*(?:\^\{?(\d)\}?)?$"
)
MONEY = re.compile(r"[-+]?\\?\$ ?[\d.,]+")
UNIT_NAMES = {"lb": "pound", "oz": "ounce", "feet": "foot", "ft": "foot", "inche": "inch", "square": "2", "cubic": "3"}
# No sums and quotients. The second is one as an answer to -2, but not as the reference.
DATE_OR_TIME = re.compile(r"(?i)\d{1,4}(?:-\d{1,2}){2}|\d+/\d+/\d+|\d\d?:[0-5]\d(?::[0-5]\d)?(?: ?[ap]\.?m\.?)?")
RANGE = re.compile(r"\d+(?:[.,]\d+)*-\d+(?:[.,]\d+)*(?: [^\W\d_]+)*")
DASH = re.compile(r"(?<=\d)\s*(?:-+|[–—]|\bto\b)\s*(?=\d)")
OPTION = re.compile(r"^(?:\(([A-Z])\)(?:\\?\s[^A-Z(]*)?|\(?([A-Z])\)?(?:[.):]\s.*)?)$")  # (C), (C) 12, C. Paris
# The question as a formula, which math-verify would compute
UNEVALUATED = re.compile(r"\\(?:sum|prod|int|lim|gcd|lcm|lfloor|lceil)(?![a-z])|mod\b")
BRACED = re.compile(r"\{[^{}]*\}")
FORMULA = re.compile(r"[\d\\$]")  # what has one of these states a formula or a number
NUMBER = re.compile(r"[-+]?[\d.,]+")
# Letters behind a number that are no unit: math-verify would leave them out, as it does units.
VARIABLES = re.compile(r"[\d}](?!(?:cm|ft|kg|km|lb|mg|mm|oz|[ghlms])$)[a-zA-Z]{1,2}$")
VARIABLES_KEPT = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="all", units=False)
    ),
    ExprExtractionConfig(),
)
# numbers, operators and letters, in words
NOT_UNITS = re.compile(
    r" (?:alpha|and|beta|cubed|delta|epsilon|factorial|gamma|half|halves|lambda|minus|omega|or|over|phi|plus|psi|rho|"
    r"sigma|sqrt|squared|tau|theta|times|(?:billion|dozen|hundred|million|thousand|trillion)(?:th)?s?|"
    r"(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?)\b",
    re.IGNORECASE,
)

# Notations that math-verify misreads in a box, and the same in LaTeX that it reads.
REWRITES = (
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\?\$"), ""),
    (re.compile(r"°"), r"^\\circ"),
    (re.compile(r"∞|\\?\b(?i:infinity)\b"), r"\\infty"),
    (re.compile(r"(?<=\d)(?:\\,|[ ~\u2009\u202f])(?=\d{3}(?!\d))"), ""),  # 12\,345
    (re.compile(r"(?<=\d) +(\d+)/(\d+)"), r"\\frac{\1}{\2}"),  # 3 1/2
    (re.compile(r"\\pmod\s*(?:\d+|\{[^{}]*\})\W*$"), ""),  # 43 \pmod{100}
    (re.compile(r"√(\d+)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=\d)[eE]([+-]?\d+)"), r" \\times 10^{\1}"),  # 1.2e3
)


def math(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return 0 or 1 per trajectory. Raises `ValueError` if the reference answer is empty."""
    return [float(equal(trajectory.prompt.answer, trajectory.text)) for trajectory in trajectories]


def equal(reference: str, text: str) -> bool:
    """Whether the final answer of `text` equals that of `reference`, which may be marked or bare."""
    reference = extract_final_answer(reference) or reference
    expected = _clean(reference)
    if not expected:
        raise ValueError(f"the reference answer {reference!r} is empty")

    as_text = _is_word(expected) or DATE_OR_TIME.fullmatch(expected) or RANGE.fullmatch(DASH.sub("-", expected))
    text = text.rpartition(REASONING_END)[2]
    marked = extract_final_answer(text)
    if marked is None:
        return _ends_with(text, reference, expected, as_text=bool(as_text))

    answer = _clean(marked)
    if _plain(answer) == _plain(expected):
        return True
    if as_text or DATE_OR_TIME.fullmatch(answer) or _other_unit(reference, marked):
        return False
    if _is_uncomputed(expected, answer):
        return False
    if _verify(expected, answer):
        return True
    number, expected_number = _without_unit(answer), _without_unit(expected)
    if (number == answer) != (expected_number == expected) and _verify(expected_number, number):
        return True

    # After ####, people write "18 dollars": the last number counts. A box holds the answer and nothing else.
    in_words = "\\" not in answer and WORD.search(answer) is not None
    return "\\boxed" not in text and in_words and _verify_last(expected, answer)


def _ends_with(text: str, reference: str, expected: str, *, as_text: bool) -> bool:
    """Whether an unmarked answer at the end of a text, stated or not, is the expected one."""
    tail = text[-TAIL:]
    last_words = "" if _is_word(expected) or not as_text else " ".join(tail.split()[-len(expected.split()) :])
    possible = [tail if len(text) <= TAIL else "", last_words]
    if stated := [*STATED.finditer(tail)][-1:]:
        possible = [stated[0][1]]  # the last of several
        tail = stated[0][0] if FORMULA.search(stated[0][1]) else tail
    if _plain(expected) in [_plain(_clean(each)) for each in possible]:
        return True
    if as_text or (stated and _is_uncomputed(expected, stated[0][1])):
        return False
    return not _other_unit(reference, tail.rstrip(TRAILING)) and _verify_last(expected, tail)


def _is_uncomputed(expected: str, answer: str) -> bool:
    """Whether a number is asked for, and the answer, after its last equals sign, is a formula to be computed."""
    outside = BRACED.sub(lambda found: "_" * len(found[0]), answer)  # k=1 below a sum is no result
    return bool(NUMBER.fullmatch(expected) and UNEVALUATED.search(answer[outside.rfind("=") + 1 :]))


def _plain(answer: str) -> str:
    """Return an answer as text that is compared as it is: `(B)` as B, `3 to 5` as 3-5, words in small letters."""
    answer = OPTION.sub(r"\1\2", WRAPPER.sub(r"\1", DASH.sub("-", answer)))
    return answer.casefold() if _is_word(answer) or DATE_OR_TIME.fullmatch(answer) else answer


def _other_unit(reference: str, answer: str) -> bool:
    """Whether both end with a unit, and not with the same: `5 hours` and `5 minutes`."""
    short, long = sorted(map(_unit, (reference, answer)), key=len)
    if not short or short == long:
        return False
    rest = iter(long)  # an abbreviation has some of the letters: hr, min, mph
    return not (len(short) <= 3 < len(long) and short[0] == long[0] and all(letter in rest for letter in short))


def _unit(answer: str) -> str:
    """Return the unit at the end of an answer, in the singular and with its power; nothing if there is none."""
    found = UNIT.search(answer.strip())
    if not found:
        return "dollar" if MONEY.fullmatch(answer.strip()) else ""
    words = [each.removesuffix("s") for each in re.findall(r"[^\W_]+", "".join(each or "" for each in found.groups()))]
    return "".join(sorted((UNIT_NAMES.get(each, each) for each in map(str.casefold, words)), key=str.isdigit))


def _without_unit(answer: str) -> str:
    """Return the number of `12 dollars`, which as mathematics is 12 times seven variables; else the answer."""
    found = WITH_UNIT.fullmatch(answer)
    return found[1] if found and not NOT_UNITS.search(found[2]) else answer


def _is_word(answer: str) -> bool:
    """Whether an answer is read as words; one or two letters are rather variables."""
    return answer.replace(" ", "").isalpha() and len(answer) > 2


def _verify(expected: str, answer: str) -> bool:
    """Compare two whole answers. Of two percentages, the numbers are compared."""
    if expected.endswith("%") and answer.endswith("%"):
        expected = expected[:-1]
        answer = answer[:-1]
    return verify(_parse(expected), _parse(answer), timeout_seconds=None)


def _verify_last(expected: str, text: str) -> bool:
    """Compare with what math-verify finds at the end of a text, unless it is only the first digits of a number."""
    found = parse(text, parsing_timeout=None)
    if found and str(found[-1]) in {number.replace(",", "") for number in CUT.findall(text)}:
        return False
    return verify(_parse(expected), found, timeout_seconds=None)


@lru_cache(maxsize=256)  # references and answers repeat within a group
def _parse(answer: str) -> list[Any]:
    """Parse a whole answer with math-verify, into expressions and their text: `50%` as 50 and as 50/100."""
    number = answer.removesuffix("%")
    if VARIABLES.search(number):
        return parse(f"\\boxed{{{number}}}", VARIABLES_KEPT, parsing_timeout=None)
    parsed = parse(f"\\boxed{{{number}}}", parsing_timeout=None)

    # math-verify reads a percent sign after a formula, and none inside
    return parsed if number == answer else [*parsed, *parse(f"${number}$%", parsing_timeout=None)]


def _clean(answer: str) -> str:
    r"""Strip an answer of padding and wrappers, and rewrite what is misread: `$\text{Paris}$.` → `Paris`."""
    for pattern, replacement in REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = _strip(answer)

    wrapped = WRAPPER.fullmatch(answer)
    return _strip(wrapped[1]) if wrapped else answer


def _strip(answer: str) -> str:
    return answer.lstrip(LEADING).rstrip(TRAILING)


# math-verify builds its tables on first use: do it while the worker starts, outside of any call's timeout
equal("1", "\\boxed{2}")

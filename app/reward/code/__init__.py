"""Reward component `code`: runs a row's tests on the program in a completion, its last fenced block.

code ─→ row_tests: reads the tests
     └→ judge: has the expected values ══ expressions, values ══ sandbox: runner, the program
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from app.reward.code.judge import Judge
from app.reward.code.row_tests import read_tests
from app.reward.code.sandbox import LocalSandbox
from app.reward.format import REASONING_END
from app.types import Trajectory

BACKTICKS = "```"
FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")  # indentation, fence, language and maybe a title
OPENS = re.compile(r"[\w+#.-]*\w(?:\s+(?:title=|\{).*)?")  # what stands behind a fence that opens a block
PYTHON = re.compile(r"\W*(?i:python|py)[\d.]*(?![\w-])")


class code:  # noqa: N801  a component has its name
    """Scores 1 if the program passes all tests within `timeout_s`, else 0; with `partial`, the share that it passes."""

    def __init__(self, timeout_s: float, partial: bool = False, memory_mib: int = 512) -> None:
        self._partial = partial
        self._judge = Judge(LocalSandbox(memory_mib << 20), stop_early=not partial, timeout_s=timeout_s)

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        """Return a score for each; `passed` is the share of tests that passed before the judge stopped."""
        scores = []
        for trajectory in trajectories:
            tests = read_tests(trajectory.prompt.row, trajectory.prompt.answer)
            program = last_block(trajectory.text, tests.names)
            share = 0.0 if program is None else self._judge.passed(program, tests) / len(tests.cases)
            scores.append({"score": share if self._partial else float(share == 1), "passed": share})
        return scores


def last_block(text: str, names: Collection[str] = ()) -> str | None:
    r"""Return the fenced block that is the program; None if no closed one is of Python or without a language.

    Of several, it is the last of those that define one of the names, or call a function where there are no names; of
    these, the last that is marked as Python. Reasoning, up to the last `</think>`, is left out.

    >>> last_block("So:\n```python\nx = 1\n```\nDone.")
    'x = 1\n'
    """
    known = "|".join(map(re.escape, names))
    defines = rf"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(?:{known})\b|^(?:{known})[ \t]*(?::|=(?!=))"
    fits = re.compile(defines if names else r"\w\(", re.MULTILINE)
    found = [(not language, body) for language, body in blocks(text.rpartition(REASONING_END)[2])]
    ranked = [(fits.search(body) is not None, not bare, index) for index, (bare, body) in enumerate(found)]
    return found[max(ranked)[2]][1] if ranked else None


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the lines of each closed block of Python or without a language.

    A fence with a language opens a block, also in one that was never closed. Fences that are indented by more than
    three spaces are lines of the program, in a docstring.
    """
    fence = None  # of the block that is open
    indent, language, lines = "", "", list[str]()
    for line in text.split("\n"):
        found = FENCE.fullmatch(line)
        inside = found and fence and len(found[1]) > len(indent) + 3
        before, opened, late = line.rstrip().rpartition(BACKTICKS)
        if found and not inside and (fence is None or OPENS.fullmatch(found[3].strip())):
            indent, fence, language, lines = found[1], found[2], found[3].strip(), []
        elif fence is None and opened and "`" not in before and PYTHON.fullmatch(late):  # Such as: ```python
            indent, fence, language, lines = "", opened, late, []
        elif fence is not None:
            alone = bool(found and found[2].startswith(fence))  # with words behind it, or none
            closes = not inside and (alone or line.rstrip().endswith(fence))
            last = "" if alone else line.rstrip().rstrip(fence[0])
            if last.strip() or not closes:
                lines.append(last if closes else line.removeprefix(indent))
            if closes:
                fence = None
                if not language or PYTHON.match(language):
                    yield language, "".join(f"{each}\n" for each in lines)

"""Reward component `code`: the tests of the row, run on the last fenced block of the completion.

code ─→ row_tests: the row's tests
     └→ judge: what is expected stays here ══ operations, values ══ sandbox: runner, the program of the completion
"""

import sys
from collections.abc import Sequence
from typing import Any

from app.reward.code.judge import Judge
from app.reward.code.row_tests import read_tests
from app.reward.code.sandbox import sandbox_of
from app.types import Trajectory

FENCE = "```"
LANGUAGES = ("", "python", "py", "python3")


class code:  # noqa: N801  a component has its name
    """Scores trajectories with 1 if the program passes all tests, else 0; with `partial`, with the share it passes.

    Args:
        timeout_s: For all tests of a program.
        partial: Score the share.
        sandbox: auto, namespaces, process, or the URL of a Sandbox Fusion server.
        memory_mib: Of each process of a program.

    Raises:
        SandboxError: There is no such sandbox here.
    """

    def __init__(self, timeout_s: float, partial: bool = False, sandbox: str = "auto", memory_mib: int = 512) -> None:
        self._partial = partial
        self._judge = Judge(sandbox_of(sandbox, memory_mib << 20), stop_early=not partial, timeout_s=timeout_s)
        sys.stderr.write(f"reward code, sandbox {self._judge.sandbox.description}\n")

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        """Return a score for each, and the share of its tests that passed until it was decided."""
        return [self._score(each) for each in trajectories]

    def _score(self, trajectory: Trajectory) -> Any:
        tests = read_tests(trajectory.prompt.row, trajectory.prompt.answer)
        program = last_block(trajectory.text)
        share = 0.0 if program is None else self._judge.passed(program, tests) / len(tests.cases)
        return {"score": share if self._partial else float(share == 1), "passed": share}


def last_block(text: str) -> str | None:
    r"""Return the last closed fenced block of Python, or without a language; None if there is none.

    >>> last_block("So:\n```python\nx = 1\n```\nDone.")
    'x = 1\n'
    """
    found = None
    language: str | None = None  # of the block that is open
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if not line.lstrip().startswith(FENCE):
            lines.append(line)
        elif language is None:
            language, lines = line.strip().strip("`").strip().lower(), []
        else:
            found = "".join(lines) if language in LANGUAGES else found
            language = None
    return found

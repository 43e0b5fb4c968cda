r"""Reward component `format`: 1 if the completion marks a final answer with `\boxed{…}` or `#### …`; else 0.

Completions are untrusted, so extraction is linear in the length of the text.
"""

from collections.abc import Sequence

from app.types import Trajectory

BOXED = r"\boxed{"
HASHES = "####"


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
    _, mark, rest = text.rpartition(HASHES)
    after_hashes = rest.strip(" \t").split("\n", 1)[0].strip() if mark else ""
    return _boxed(text) or after_hashes or None


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

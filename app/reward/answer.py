r"""Where a text says what its final answer is: the last `\boxed{…}`, or what follows the last `####` on its line.

Linear in the length of the text, whatever the text is: completions are not to be trusted.
"""

BOXED = r"\boxed{"
HASHES = "####"


def extract_final_answer(text: str) -> str | None:
    """The marked final answer, stripped; None where nothing is marked, or nothing stands in the mark.

    >>> marked(r"so it is \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    >>> marked("2 + 2 = 4\\n#### 4")
    '4'
    """
    return _boxed(text) or _after_hashes(text)


def _boxed(text: str) -> str | None:
    """The inside of the last `\\boxed{` whose brace is closed, up to that brace."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    start += len(BOXED)
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place].strip() or None
    return None


def _after_hashes(text: str) -> str | None:
    _, found, rest = text.rpartition(HASHES)
    line = rest.strip(" \t").split("\n", 1)[0].strip()
    return line or None if found else None

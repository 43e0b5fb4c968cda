"""Observations within `environment.max_observation_tokens`."""

from collections.abc import Callable

SHRINK = 0.9  # of the length that should fit, since tokens are not spread evenly
LONG_TOKEN = 64  # characters: few tokens are longer


def shorten(text: str, max_tokens: int, count: Callable[[str], int]) -> str:
    r"""Return a text in at most `max_tokens` tokens: cut in the middle, with a note about it.

    Args:
        text: An observation.
        max_tokens: Tokens that the result may have, the note included.
        count: Returns the tokens of a text.

    >>> shorten("a" * 1000, 50, len)
    'aaaaaaaa\n[... 985 characters left out ...]\naaaaaaa'
    """
    if len(text.encode(errors="replace")) <= max_tokens:
        return text  # a token has at least one byte

    kept = min(len(text), max_tokens * LONG_TOKEN)  # tokenizing megabytes takes seconds
    shortened = _without_middle(text, kept)
    tokens = count(shortened)
    while tokens > max_tokens and kept:
        kept = min(kept - 1, int(kept * SHRINK * max_tokens / tokens))
        shortened = _without_middle(text, kept)
        tokens = count(shortened)
    return shortened


def _without_middle(text: str, kept: int) -> str:
    if kept == len(text):
        return text
    head = text[: (kept + 1) // 2]
    tail = text[len(text) - kept // 2 :]
    return f"{head}\n[... {len(text) - kept} characters left out ...]\n{tail}"

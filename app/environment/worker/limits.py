"""The limits of an episode: its turns, its time, and the tokens of completions and observations."""

from collections.abc import Callable

from app.environment.protocol import EpisodeOver, OutOfTime, OutOfTurns
from app.environment.wire import Limits

SHRINK = 0.9  # of the length that should fit, since tokens are not spread evenly
LONG_TOKEN = 64  # characters: few tokens are longer


def reached(limits: Limits, requests_sent: int, seconds: float) -> EpisodeOver | None:
    """Return the limit that forbids another request of an episode to its policy, if one does."""
    if requests_sent >= limits.max_turns:
        return OutOfTurns(f"environment.max_turns={limits.max_turns}")
    if seconds > limits.episode_s:
        return OutOfTime(f"environment.episode_s={limits.episode_s:g}")
    return None


def turn_tokens(limits: Limits, max_tokens: int | None) -> int | None:
    """Return the most tokens of a completion: the environment's own limit, or `environment.max_turn_tokens`."""
    return min((each for each in (max_tokens, limits.max_turn_tokens) if each is not None), default=None)


def shorten(text: str, max_tokens: int, count: Callable[[str], int]) -> str:
    r"""Shorten a text to at most `max_tokens` tokens: its middle is replaced by a note on what was cut.

    Args:
        max_tokens: Maximum length of the result, including the note.
        count: Counts the tokens of a text.

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

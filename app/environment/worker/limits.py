"""The limits of an episode, of an observation and of a worker's memory."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from app.environment.protocol import EpisodeOver, OutOfTime, OutOfTurns
from app.environment.wire import Limits
from app.utils.user_code import LoadError

SHRINK = 0.9  # of the length that should fit, since tokens are not spread evenly
LONG_TOKEN = 64  # characters: few tokens are longer
GIB = 1 << 30


class Clock:
    """Measures an episode's time in its environment's own code, without waiting for engines.

    `timeout_s` limits a segment, which is the time between two requests to the policy, or a call of a method.
    """

    def __init__(self, timeout_s: float) -> None:
        self.step = "run"  # what runs now, for people
        self._timeout_s = timeout_s
        self._since = time.monotonic()  # of the current segment
        self._before = 0.0  # seconds of the earlier ones
        self._requests = 0  # in flight; while there are any, the episode waits

    def begin(self, step: str) -> None:
        self._before = self.seconds
        self._since = time.monotonic()
        self.step = step

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the clock while a request to the policy is in flight."""
        if self._requests == 0:
            self._before = self.seconds
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the environment's own code so far."""
        return self._before + self._segment_s

    @property
    def left(self) -> float:
        """Seconds until the current segment is late; not positive: it is."""
        return self._timeout_s - self._segment_s

    @property
    def _segment_s(self) -> float:
        return 0.0 if self._requests else time.monotonic() - self._since


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


def limit_memory(gib: float) -> None:
    """Limit the data of this process and of each child, without what is only reserved. Raises `LoadError`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    allocated = int(status.partition("VmData:")[2].split()[0]) << 10
    if allocated > gib * GIB:
        raise LoadError(
            f"environment.memory_gib={gib:g} is not accepted: give more than {allocated / GIB:.2g}, which the worker "
            "has allocated before the first episode."
        )

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

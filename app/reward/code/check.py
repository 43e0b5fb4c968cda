"""The check before a run with `reward=code`: its sandbox, and the tests of the rows."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import ConfigError
from app.reward.code.row_tests import ACCEPTED, NoTests, read_tests
from app.reward.code.sandbox import reads_files, unavailable

MAX_ROWS = 500  # of a set: compressed tests take milliseconds to read


def require_sandbox() -> tuple[str, bool]:
    """Return what the sandbox keeps from programs, and whether to warn. Raises `ConfigError` if none can run here."""
    if (reason := unavailable()) is not None:
        raise ConfigError("reward", "code", "a machine with seccomp, x86_64 or aarch64", reason)
    if not reads_files():
        return "programs have no access to files, network or other processes", False
    reads = "files that all users can" if os.getuid() == 0 else "this user's files, the tests of their row included"
    return f"programs have no network and send no signals; without Landlock in the kernel they read {reads}", True


def describe_tests(sets: Sequence[Sequence[tuple[str, Mapping[str, Any], str]]]) -> str:
    """Count the forms of tests in sets of (place, columns, answer). Raises `ConfigError` for a row without tests."""
    forms: Counter[str] = Counter()
    for place, columns, answer in (row for rows in sets for row in rows[:MAX_ROWS]):
        try:
            forms[read_tests(columns, answer).form] += 1
        except NoTests as error:
            raise ConfigError("reward", "code", ACCEPTED, f"{place}: {error}") from error
    counted = ", ".join(f"{name} in {count:,} rows" for name, count in forms.items())
    unread = any(len(rows) > MAX_ROWS for rows in sets)
    return f"{counted}{f', of the first {MAX_ROWS} of each set' if unread else ''}"

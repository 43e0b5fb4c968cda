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
    """Return what the sandbox protects, and whether a run warns of it.

    Raises:
        ConfigError: It cannot run a program here.
    """
    if (reason := unavailable()) is not None:
        raise ConfigError("reward", "code", "a machine with seccomp, x86_64 or aarch64", reason)
    without = "files, network or processes of the machine"
    if reads_files():
        reads = "files that every user can" if os.getuid() == 0 else "what this user can, the tests of its row among it"
        without = f"network or signals; the kernel has no Landlock, so it reads {reads}"
    return f"a program of a completion runs without {without}", reads_files()


def describe_tests(sets: Sequence[Sequence[tuple[str, Mapping[str, Any], str]]]) -> str:
    """Return the forms of the tests of the rows of each set, each a place, its columns and its answer.

    Raises:
        ConfigError: One of the first rows of a set has none that can be read.
    """
    forms: Counter[str] = Counter()
    for place, columns, answer in (row for rows in sets for row in rows[:MAX_ROWS]):
        try:
            tests = read_tests(columns, answer)
        except NoTests as error:
            raise ConfigError("reward", "code", ACCEPTED, f"{place}: {error}") from error
        forms[tests.form] += 1
    counted = ", ".join(f"{name} in {count:,} rows" for name, count in forms.items())
    unread = any(len(rows) > MAX_ROWS for rows in sets)
    return f"{counted}{f', of the first {MAX_ROWS} of each set' if unread else ''}"

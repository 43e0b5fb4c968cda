"""The check before a run with `reward=code`: its sandbox, and the tests of the rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from app.config.reward import CodeArgs
from app.errors import ConfigError
from app.reward.code.row_tests import ACCEPTED, NoTests, read_tests
from app.reward.code.sandbox import NAMESPACES, PROCESS, SandboxError, available, sandbox_of

MAX_ROWS = 500  # of a set: compressed tests take milliseconds to read


def require_sandbox(args: CodeArgs) -> tuple[str, bool]:
    """Return what the sandbox protects, and whether a run warns of it.

    Raises:
        ConfigError: It cannot run a program here.
    """
    try:
        description = sandbox_of(args.sandbox, args.memory_mib << 20).description
    except SandboxError as error:
        working = [kind for kind in (NAMESPACES, PROCESS) if available(kind) is None]
        accepted = " or ".join(working) or "a machine with bubblewrap, or with seccomp"
        raise ConfigError("reward.args.sandbox", args.sandbox, accepted, str(error)) from error
    return f"programs of completions run in {description}", args.sandbox == "auto" and description.startswith(PROCESS)


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

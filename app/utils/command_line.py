"""Command lines in messages, to be copied: quoted where Hydra or the shell needs it."""

import re
import shlex


def override(key: str, value: object) -> str:
    """Return `key=value` as a word of a shell's command line.

    >>> print(override("resume", "runs/mine"), override("resume", "my runs/a=b"))
    resume=runs/mine 'resume="my runs/a=b"'
    """
    text = str(value)
    if not re.fullmatch(r"[\w/.+-]+", text):
        text = '"' + text.replace('"', r"\"") + '"'
    return shlex.quote(f"{key}={text}")


def command(*overrides: str) -> str:
    """Return the command line with these overrides, each from `override`."""
    return " ".join(("python -m app", *overrides))

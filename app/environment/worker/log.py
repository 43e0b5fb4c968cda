"""The log of a worker: its stderr, whatever an environment does to `sys.stderr`."""

import contextlib
import os

STDERR = 2


def log(text: str) -> None:
    """Append lines to the log."""
    with contextlib.suppress(OSError):  # the environment has closed it
        os.write(STDERR, f"{text.rstrip()}\n".encode(errors="backslashreplace"))

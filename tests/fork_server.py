"""One fork server for all engines of a test session, also for those of the runs that tests start."""

import atexit
import os
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from app.cpu_engine.forked_server import ForkedProcess, fork_server
from app.device.cpu import DEVICE


@cache
def shared() -> partial[ForkedProcess]:
    """Start it, on first use; it ends with this process. Returns `fork` of its socket."""
    stack = ExitStack()
    fork = stack.enter_context(fork_server(DEVICE.engine_env, Path(os.devnull)))
    atexit.register(stack.close)
    assert isinstance(fork, partial)
    return fork


def shared_socket() -> str:
    return str(shared().args[0])

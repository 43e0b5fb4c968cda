"""One fork server for all engines of a test session, also for those of the runs that tests start."""

import atexit
import os
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from app.device.cpu import DEVICE
from app.rollout.sglang_plugin.forked_server import fork_server


@cache
def shared() -> Path:
    """Start it, on first use; it ends with this process."""
    stack = ExitStack()
    path = stack.enter_context(fork_server(DEVICE.engine_env, Path(os.devnull)))
    atexit.register(stack.close)
    return path

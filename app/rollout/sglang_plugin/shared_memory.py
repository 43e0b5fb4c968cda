"""Runs inside SGLang's processes: gives SGLang's files in shared memory the run's name.

A server ends by SIGKILL, which leaves them: 16 KB of load reports, and with tensor parallelism the ring buffers of its
ranks. The process reaper removes what has the run's name.
"""

import os
from multiprocessing import shared_memory
from typing import Any

from app.utils.process import MARK, SHARED_MEMORY, run_prefix

LOAD_REPORTS = "sglang.srt.managers.load_snapshot.shm_path_for"
RANDOM_CHARACTERS = 16


def register() -> None:
    """Register the hook, and change the names that Python gives, unless the run has no mark on this machine."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if MARK in os.environ:
        HookRegistry.register(LOAD_REPORTS, with_run_prefix, HookType.AFTER)
        prefix = f"/{run_prefix()}"
        vars(shared_memory).update(_SHM_NAME_PREFIX=prefix, _SHM_SAFE_NAME_LENGTH=len(prefix) + RANDOM_CHARACTERS)


def with_run_prefix(path: str, *_: Any) -> str:
    """Return the path of a server's load reports with the run's name."""
    return f"{SHARED_MEMORY}/{run_prefix()}{path.rpartition('/')[2]}"

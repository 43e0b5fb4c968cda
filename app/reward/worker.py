"""The process that rewards run in: `python -m app.reward.worker <pipe's descriptor> <parent's process id>`.

    parent ── list[Part] ─────────→ worker loads them ── None, or why one cannot be loaded ─→ parent
           ── (part, trajectories) → worker calls it ─── Outcome ────────────────────────────→ parent, and again

Always holds: it dies with its parent, even when that is killed and even while a reward hangs (the kernel sends SIGKILL;
elsewhere than on Linux, the end of the pipe does it between two calls). Ctrl-C is the parent's affair. Pickle is safe
here: both ends of the pipe are ours.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from app.reward.component import LoadError, RewardComponent
from app.reward.outcome import evaluate

PR_SET_PDEATHSIG = 1  # linux/prctl.h
BUILT_IN_MEMORY = 4 << 30  # bytes of address space where only built-in parts run: 9^{9^{9^9}} must not eat the machine


def main(descriptor: int, parent: int) -> None:
    """Serve until the parent closes its end of the pipe."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(descriptor) as pipe, asyncio.Runner() as runner:
        try:
            _serve(pipe, runner)
        except (EOFError, ConnectionError):
            return  # the parent is done with us


def _serve(pipe: Connection, runner: asyncio.Runner) -> None:
    parts: Sequence[RewardComponent] = pipe.recv()
    try:
        rewards = {part.name: part.load() for part in parts}
    except LoadError as error:
        pipe.send(str(error))
        return
    if all(part.target.startswith(f"{__spec__.parent}.") for part in parts):
        _limit_memory()
    pipe.send(None)
    while True:
        name, trajectories = pipe.recv()
        pipe.send(evaluate(rewards[name], trajectories, runner))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        raise SystemExit(1)


def _limit_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = BUILT_IN_MEMORY if hard == resource.RLIM_INFINITY else min(BUILT_IN_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""The reward worker process: `python -m app.reward.worker <pipe descriptor> <parent pid>`.

    parent ── list[RewardComponent] ────→ worker loads them ── None, or the load error ─→ parent
           ── (component, trajectories) → worker calls it ──── Outcome ─────────────────→ parent, repeatedly

Invariants:
- The worker dies with its parent, even if the parent is killed or a reward hangs: the kernel sends SIGKILL. On other
  systems than Linux it exits between two calls, when the pipe closes.
- Ctrl-C is handled by the parent; the worker ignores SIGINT.
- Both ends of the pipe are ours, so unpickling is safe.
"""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from app.reward.component import LoadError, RewardComponent
from app.reward.outcome import Failure, evaluate
from app.utils.process import die_with_parent

BUILT_IN_MEMORY = 4 << 30  # bytes of address space for built-in components: 9^{9^{9^9}} must not exhaust the machine


def main(descriptor: int, parent: int) -> None:
    """Serve until the parent closes its end of the pipe."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, os.getcwd())  # of custom rewards; only now, since it may have a folder named as this package
    with Connection(descriptor) as pipe, asyncio.Runner() as runner:
        try:
            _serve(pipe, runner)
        except (EOFError, ConnectionError):
            return  # the parent closed the pipe


def _serve(pipe: Connection, runner: asyncio.Runner) -> None:
    components: Sequence[RewardComponent] = pipe.recv()
    try:
        rewards = {component.name: component.load() for component in components}
    except LoadError as error:
        pipe.send(str(error))
        return

    if all(component.target.startswith(f"{__spec__.parent}.") for component in components):
        _limit_memory()
    pipe.send(None)

    while True:
        name, trajectories = pipe.recv()
        outcome = evaluate(rewards[name], trajectories, runner)
        if isinstance(outcome, Failure):
            sys.stderr.write(f"{name} failed on {len(trajectories)} trajectories: {outcome}\n")
        pipe.send(outcome)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = BUILT_IN_MEMORY if hard == resource.RLIM_INFINITY else min(BUILT_IN_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

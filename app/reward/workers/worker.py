"""The reward worker process: `python -m app.reward.workers.worker <pipe descriptor> <parent pid>`.

    parent ── RewardComponent ───→ worker loads it ── None, or the load error ─→ parent
           ── trajectories ──────→ worker calls it ── Outcome ─────────────────→ parent, repeatedly

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

from app.reward.component import RewardComponent
from app.reward.outcome import Outcome, evaluate, failures
from app.types import Trajectory
from app.utils.child_process import die_with_parent
from app.utils.dotted_path import LoadError

BUILT_IN_MEMORY = 4 << 30  # bytes of address space for a built-in component: 9^{9^{9^9}} must not exhaust the machine


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
    component: RewardComponent = pipe.recv()
    try:
        reward = component.load()
    except LoadError as error:
        pipe.send(str(error))
        return

    if component.key is None:
        _limit_memory()
    pipe.send(None)

    while True:
        trajectories: Sequence[Trajectory] = pipe.recv()
        outcome = evaluate(reward, trajectories, runner)
        _log(component.name, trajectories, outcome)
        pipe.send(outcome)


def _log(name: str, trajectories: Sequence[Trajectory], outcome: Outcome) -> None:
    """Write the failures of a call, each kind of message once, to the log, which is stderr."""
    prompts = ", ".join(dict.fromkeys(trajectory.prompt.id for trajectory in trajectories))
    for failure in dict.fromkeys(failures(outcome)):
        sys.stderr.write(f"{name} failed on {prompts}, {len(trajectories)} trajectories: {failure}\n")


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = BUILT_IN_MEMORY if hard == resource.RLIM_INFINITY else min(BUILT_IN_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

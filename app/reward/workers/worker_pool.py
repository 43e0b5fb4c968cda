"""The worker processes of one reward component.

Invariants:
- A worker is used by one thread at a time.
- After a call for several trajectories fails, each is scored again, alone, so that only the offending one fails.
- After a worker died, its trajectories are scored again: another cause than the reward may have killed it.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from app.errors import RunError
from app.reward.component import BUILT_IN_LIMIT_S, RewardComponent
from app.reward.outcome import Failure, FailureKind, Outcome, Value
from app.reward.workers.worker_process import WorkerProcess
from app.types import Trajectory
from app.utils.dotted_path import LoadError

SLOW_AFTER_S = 10.0  # a call without a result is reported, long before its deadline


class WorkerPool:
    """Scores trajectories with one component, in `threads` that each use one of the worker processes.

    Args:
        component: What the workers load.
        workers: Processes.
        timeout_s: Deadline per trajectory.
        log: File for their output (None: stderr).
        warn: Called, from any thread, when for the first time a call is slow, or its trajectories are scored again.

    Attributes:
        retried: Trajectories that were scored again, alone.
        threads: Where `score` may be called.
    """

    def __init__(
        self,
        component: RewardComponent,
        *,
        workers: int,
        timeout_s: float,
        log: Path | None,
        warn: Callable[[str], None],
    ) -> None:
        self.component = component
        self.retried = 0
        self._timeout_s = timeout_s if component.key is not None else min(timeout_s, BUILT_IN_LIMIT_S)
        self._warn = warn
        self._warned: set[str] = set()
        self._stopped = False
        self._warn_lock = threading.Lock()
        self._workers = [WorkerProcess(component, log) for _ in range(workers)]
        self._free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        # The kernel kills a worker when the thread that started it ends, so these threads last as long as the pool.
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix=f"reward {component.name}")

    def start(self) -> list[Future[None]]:
        """Start all workers in the background."""
        return [self.threads.submit(self._start_worker, worker) for worker in self._workers]

    def score(self, trajectories: Sequence[Trajectory]) -> Outcome:
        """Return a value or a failure for each trajectory. Blocks; called in `threads`.

        Raises:
            RunError: A worker cannot be started again, or cannot load the component.
        """
        worker = self._free.get()
        try:
            return self._score(worker, trajectories)
        except LoadError as error:
            raise RunError(f"A reward worker cannot load {self.component.name}: {error}.") from error
        except OSError as error:  # no descriptor or no memory is left for its process
            raise RunError(f"A reward worker cannot be started for {self.component.name}: {error.strerror}.") from error
        finally:
            self._free.put(worker)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are running."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def stop(self) -> None:
        """Kill the workers. Calls of `score` in flight end with failures."""
        self._stopped = True
        for worker in self._workers:
            worker.close()

    def close(self) -> None:
        """End the threads. Called after `stop`."""
        self.threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def _start_worker(self, worker: WorkerProcess) -> None:
        """Start a worker, in a thread, and only then add it to the free queue, so that no two threads use it."""
        try:
            worker.start()
        finally:
            self._free.put(worker)

    def _score(self, worker: WorkerProcess, trajectories: Sequence[Trajectory]) -> Outcome:
        outcome = self._call(worker, trajectories)
        if self._stopped or not isinstance(outcome, Failure):
            return outcome
        alone = len(trajectories) == 1
        if alone and outcome.kind is not FailureKind.died:
            return outcome

        count = "1 trajectory" if alone else f"{len(trajectories)} trajectories"
        again = f"failed on a call for {count} ({outcome}); each of them is scored again, alone."
        self._warn_once("again", again)
        self.retried += len(trajectories)
        values: list[Value] = []
        for trajectory in trajectories:
            single = self._call(worker, [trajectory])
            values.extend([single] if isinstance(single, Failure) else single)
        return values

    def _call(self, worker: WorkerProcess, trajectories: Sequence[Trajectory]) -> Outcome:
        deadline_s = self._timeout_s * len(trajectories)
        slow = (
            f"has no result for {len(trajectories)} trajectories after {SLOW_AFTER_S:g} s; it has {deadline_s:g} s "
            "(reward.timeout_s). reward.workers processes score as many groups at a time."
        )
        return worker.call(
            trajectories, deadline_s, slow_after_s=SLOW_AFTER_S, on_slow=lambda: self._warn_once("slow", slow)
        )

    def _warn_once(self, event: str, text: str) -> None:
        with self._warn_lock:
            known = event in self._warned
            self._warned.add(event)
        if not known:
            self._warn(f"reward component {self.component.name} {text}")

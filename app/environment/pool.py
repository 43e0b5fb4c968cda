"""The driver's environment workers: begins episodes where there is room, and replaces workers that hang or die.

Invariants:
- At most `workers * episodes` episodes run; `begin` waits for a place.
- A worker that ended is replaced; one whose episodes were cancelled, when the next episode begins. If its successor
  cannot be started, for whatever reason, every `begin` raises.
- After `close`, no process of the pool is left.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.environment.environment_process import WorkerSpec
from app.environment.episode_session import EpisodeSession
from app.environment.protocol import Task
from app.environment.remote import EnvironmentWorker, State
from app.errors import RunError, one_line
from app.utils.tasks import gather_or_raise, in_thread

CHECK_S = 0.5  # between two looks at the workers


class EnvironmentPool:
    """Worker processes, each of which plays several episodes at once. Used on one event loop.

    Lifecycle: start → begin* → close.

    Args:
        spec: What each worker runs.
        workers: Processes.
        episodes: That one process plays at once.
        log: File for their output (None: stderr).
        warn: Called with a sentence when a worker is replaced.

    Attributes:
        failures: Failed episodes by kind.
        restarts: Workers that were replaced.
    """

    def __init__(
        self, spec: WorkerSpec, *, workers: int, episodes: int, log: Path | None, warn: Callable[[str], None]
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.restarts = 0
        self._spec = spec
        self._size = workers
        self._episodes = episodes
        self._log = log
        self._warn = warn
        self._workers: list[EnvironmentWorker] = []
        self._ended: list[EnvironmentWorker] = []  # to be replaced by the next `begin`
        self._replaced: set[EnvironmentWorker] = set()  # killed, not yet reaped
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: RunError | None = None
        self._closed = False

    async def start(self) -> None:
        """Start all workers.

        Raises:
            ConfigError: The environment cannot be loaded; its own sentence.
            RunError: A worker died or took too long.
        """
        self._workers = [self._new_worker() for _ in range(self._size)]
        try:
            await gather_or_raise(*(worker.start() for worker in self._workers))
        except BaseException:
            self.close()
            raise
        self._spawn(self._watch())

    @property
    def info(self) -> Mapping[str, Any]:
        """What the environment says about itself."""
        return self._workers[0].info if self._workers else {}

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.pid for worker in self._workers if worker.pid is not None and worker.state is not State.ended]

    @property
    def counts(self) -> dict[str, int]:
        """Failed episodes by kind, and `restarts`."""
        return {**self.failures, "restarts": self.restarts}

    async def begin(self, task: Task, prompt_ids: Sequence[int]) -> EpisodeSession:
        """Begin an episode in the worker with the fewest; waits for a free place.

        Raises:
            RunError: The pool is closed, or a worker could not be replaced.
        """
        queue = self._waiting.append
        while (worker := self._free()) is None:
            while self._ended:
                self._spawn(self._replace(self._ended.pop()))
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue(turn)
            queue = self._waiting.appendleft  # it was the first
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()  # its turn may have come already
                raise

        session = worker.begin(next(self._numbers), task, prompt_ids)
        if self._free() is not None:
            self._wake()
        return session

    def close(self) -> None:
        """Kill all workers. Episodes in flight end as `lost`. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for worker in self._workers:
            worker.end("lost", "the environment pool was closed")
        for worker in (*self._workers, *self._replaced):
            worker.reap()
        self._wake_all()

    def _free(self) -> EnvironmentWorker | None:
        """Return the worker with the fewest episodes and room for another."""
        if self._error is not None:
            raise self._error
        if self._closed or not self._workers:
            raise RunError(
                "The environment pool is closed." if self._closed else "The environment pool has not started."
            )
        ready = [each for each in self._workers if each.state is State.ready and len(each.sessions) < self._episodes]
        return min(ready, key=lambda each: len(each.sessions), default=None)

    def _episode_ended(self, session: EpisodeSession) -> None:
        if session.failure is not None:
            self.failures[session.failure.kind] += 1
        self._wake()

    def _worker_ended(self, worker: EnvironmentWorker) -> None:
        if worker.loaded and not self._closed:
            if worker.cancelled and all(turn.done() for turn in self._waiting):
                self._ended.append(worker)  # an episode that was woken just now looks again
            else:
                self._spawn(self._replace(worker))

    def _new_worker(self) -> EnvironmentWorker:
        return EnvironmentWorker(self._spec, self._log, self._episode_ended, self._worker_ended)

    async def _replace(self, worker: EnvironmentWorker) -> None:
        self.restarts += 1
        self._warn(f"An environment worker is replaced: {worker.problem}.")
        successor = self._new_worker()
        self._workers[self._workers.index(worker)] = successor
        self._replaced.add(worker)
        await in_thread(worker.reap)
        self._replaced.discard(worker)
        await successor.start()
        self._wake()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for worker in list(self._workers):
                worker.check()

    def _wake(self) -> None:
        """Let the first that waits look for a place; it wakes nobody else unless it is cancelled."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _wake_all(self) -> None:
        while self._waiting:
            self._wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = RunError(f"An environment worker cannot be replaced: {one_line(error)}")
            self._wake_all()

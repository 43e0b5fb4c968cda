"""A pool of workers: begins jobs where there is room, and replaces workers that hang or die.

Invariants:
- At most `workers * jobs` jobs run; `begin` waits for room.
- A worker that ended is replaced; one whose jobs were cancelled, when the next job begins. If its successor cannot be
  started, for whatever reason, every `begin` raises.
- A worker that dies while it starts is replaced once: another cause than its code may have killed it.
- After `close`, no process of the pool is left.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.errors import RunError, one_line
from app.utils.tasks import gather_or_raise, in_thread
from app.worker.remote import Job, RemoteWorker, State, WorkerDied, WorkerSpec

CHECK_TIMEOUT_S = 0.5  # between two looks at the workers


@dataclass(eq=False)
class WorkerPool:
    """Worker processes, each of which runs several jobs at once. Used on one event loop.

    Lifecycle: start_workers → begin_job* → close.
    """

    spec: WorkerSpec
    workers: int
    jobs: int  # that one process runs at once
    warn: Callable[[str], None]  # called with a sentence when a worker is replaced
    failures: Counter[str] = field(default_factory=Counter)  # failed jobs by kind
    restarts: int = 0  # workers that were replaced
    closed: bool = False
    _workers: list[RemoteWorker] = field(default_factory=list)
    _ended: list[RemoteWorker] = field(default_factory=list)  # to be replaced by the next `begin`
    _replaced: set[RemoteWorker] = field(default_factory=set)  # killed, not yet reaped
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _error: RunError | None = None

    def start_workers(self) -> asyncio.Task[None]:
        """Start all workers in the background. Once this has failed, every `begin_job` raises.

        The task raises as `RemoteWorker.start`, with `RunError` if a worker died twice.
        """
        self._workers = [self._new_worker() for _ in range(self.workers)]
        return self._spawn(self._start_all())

    @property
    def info(self) -> Mapping[str, Any]:
        return self._workers[0].info if self._workers else {}

    @property
    def pids(self) -> list[int]:
        running = [worker.process.pid for worker in self._workers if worker.state is not State.ended]
        return [pid for pid in running if pid is not None]

    @property
    def counts(self) -> dict[str, int]:
        return {**self.failures, "restarts": self.restarts}

    async def begin_job(self, payload: Any) -> Job:
        """Begin a job in the least busy worker, once one has room. Raises `RunError` if the pool is closed."""
        queue = self._waiting.append
        while True:
            worker = self._free()
            while self._ended:
                self._spawn(self._replace(self._ended.pop()))
            if worker is not None:
                break
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue(turn)
            queue = self._waiting.appendleft  # it was the first
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()  # its turn may have come already
                raise

        job = worker.begin(next(self._numbers), payload)
        if self._free() is not None:
            self._wake()
        return job

    def close(self) -> None:
        """Kill all workers. Jobs in flight end as `lost`. Idempotent."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        for worker in self._workers:
            worker.end("lost", f"the workers of {self.spec.name} were closed")
        for worker in (*self._workers, *self._replaced):
            worker.process.reap()
        self._wake_all()

    def _free(self) -> RemoteWorker | None:
        """Return the worker with the fewest jobs and room for another."""
        if self._error is not None:
            raise self._error
        if self.closed or not self._workers:
            raise RunError(f"The workers of {self.spec.name} {'are closed' if self.closed else 'have not started'}.")
        ready = [each for each in self._workers if each.state is State.ready and len(each.jobs) < self.jobs]
        return min(ready, key=lambda each: len(each.jobs), default=None)

    def _job_ended(self, job: Job) -> None:
        if job.failure is not None:
            self.failures[job.failure.kind] += 1
        self._wake()

    def _worker_ended(self, worker: RemoteWorker) -> None:
        if worker.loaded and not self.closed:
            if worker.cancelled and all(turn.done() for turn in self._waiting):
                self._ended.append(worker)  # a job that was woken just now looks again
            else:
                self._spawn(self._replace(worker))

    def _new_worker(self) -> RemoteWorker:
        return RemoteWorker(self.spec, self._job_ended, self._worker_ended)

    async def _start_all(self) -> None:
        try:
            await gather_or_raise(*(self._start(worker) for worker in self._workers))
        except BaseException as error:
            if self.closed:  # by `close`, which cancelled this task; its workers raise that they were closed
                raise asyncio.CancelledError from error
            self.close()
            raise
        self._spawn(self._watch())

    async def _start(self, worker: RemoteWorker) -> None:
        try:
            await worker.start()
        except WorkerDied:
            successor = await self._swap_in_successor(worker)
            await successor.start()
        self._wake()

    async def _replace(self, worker: RemoteWorker) -> None:
        self.restarts += 1
        self.warn(f"A worker of {self.spec.name} is replaced: {worker.problem}.")
        await self._start(await self._swap_in_successor(worker))

    async def _swap_in_successor(self, worker: RemoteWorker) -> RemoteWorker:
        successor = self._new_worker()
        self._workers[self._workers.index(worker)] = successor
        self._replaced.add(worker)
        await in_thread(worker.process.reap)
        self._replaced.discard(worker)
        return successor

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_TIMEOUT_S)
            for worker in list(self._workers):
                worker.check()

    def _wake(self) -> None:
        """Let the first that waits look for room; it wakes no other unless it is cancelled."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _wake_all(self) -> None:
        while self._waiting:
            self._wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = RunError(f"A worker of {self.spec.name} cannot be started: {one_line(error)}")
            self._wake_all()

"""Score trajectories: the weighted sum of the reward components, computed where nothing can hang or kill the run.

    trajectories ─┬─ in-process components (exact, format) ──────────────────────┬─→ reward, reward_components
                  └─ other components → a free worker process, killed on timeout ─┘

Invariants:
- Every trajectory gets a finite reward. A failed one gets 0 and its failure is counted.
- Once more than `max_failed_fraction` of a step's trajectories have failed, scoring raises a `RunError`.
"""

import asyncio
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from app.config.reward import RewardConfig
from app.errors import ConfigError, RunError
from app.reward.component import LoadError, RewardComponent, RewardFunction, built_in, custom
from app.reward.failure_tracker import FailureTracker
from app.reward.outcome import Failure, FailureKind, Outcome, Value, evaluate
from app.reward.worker_process import WorkerProcess
from app.types import Trajectory

Values = list[dict[str, Value]]  # per trajectory, by component name


class Scorer:
    """Scores trajectories with the configured components; any number of `score` calls may be in flight.

        scorer = Scorer(config.reward, step_trajectories=128, log=folder / "logs/reward.log")
        scored = await scorer.score(trajectories)  # reward and reward_components filled in
        scorer.check()                             # at the end of each step
        scorer.close()

    Args:
        config: The `reward` section.
        step_trajectories: Trajectories per step, the window over which failures are counted.
        log: File for the output of the workers (None: stderr).

    Raises:
        ConfigError: The custom reward cannot be loaded.
    """

    def __init__(self, config: RewardConfig, *, step_trajectories: int = 128, log: Path | None = None) -> None:
        self._config = config
        self._failure_tracker = FailureTracker(config.max_failed_fraction, step_trajectories)

        self._components = _components_of(config)
        self._isolated = [component for component in self._components if component.isolated]
        self._in_process: dict[str, RewardFunction] = {
            component.name: component.load() for component in self._components if not component.isolated
        }

        workers = config.workers if self._isolated else 0
        self._workers = [WorkerProcess(self._isolated, log) for _ in range(workers)]
        self._free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        if self._workers:
            self._start_workers()

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the same trajectories, in order, with `reward` and `reward_components` (unweighted) filled in.

        A custom reward is called once per run of consecutive trajectories that share a prompt.

        Raises:
            RunError: Too large a fraction of a step's trajectories has failed.
        """
        values: Values = [{} for _ in trajectories]
        for name, reward in self._in_process.items():
            _record(values, name, evaluate(reward, trajectories, None))

        if self._threads is None:
            self._count(values)
        else:
            await self._score_isolated(trajectories, values, self._threads)
        return [self._with_reward(trajectory, scores) for trajectory, scores in zip(trajectories, values, strict=True)]

    def check(self) -> None:
        """Check the failures at the end of a step, even one with fewer than `step_trajectories`; raises `RunError`."""
        self._failure_tracker.check()

    @property
    def failures(self) -> dict[FailureKind, int]:
        """Failed trajectories so far, by kind."""
        return self._failure_tracker.failures

    @property
    def metrics(self) -> dict[str, float]:
        """`reward/failed_*` by kind and `reward/retried`, in trajectories so far; `reward/failed_fraction`."""
        retried = sum(worker.retried for worker in self._workers)
        return {**self._failure_tracker.metrics, "reward/retried": float(retried)}

    def close(self) -> None:
        """Stop the workers. Calls of `score` in flight end with failures."""
        for worker in self._workers:
            worker.close()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def _start_workers(self) -> None:
        """Start all workers in the background. Wait only for a custom reward, which may fail to load."""
        # The kernel kills a worker when the thread that started it ends, so these threads last as long as the scorer.
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="reward")
        starts = [self._threads.submit(self._start_worker, worker) for worker in self._workers]

        target = self._config._target_
        if target is None:
            return
        try:
            for start in starts:
                start.result()
        except (LoadError, RunError) as error:
            self.close()
            accepted = "a function or class that can be called with a list of trajectories"
            raise ConfigError(f"reward._target_={target} is not accepted: give {accepted}; {error}.") from error

    def _start_worker(self, worker: WorkerProcess) -> None:
        """Start a worker, in a thread, and only then add it to the free queue, so that no two threads use it."""
        try:
            worker.start()
        finally:
            self._free.put(worker)

    async def _score_isolated(
        self, trajectories: Sequence[Trajectory], values: Values, threads: ThreadPoolExecutor
    ) -> None:
        loop = asyncio.get_running_loop()
        per_trajectory = all(component.per_trajectory for component in self._isolated)
        calls = [
            loop.run_in_executor(threads, self._score_chunk, trajectories[chunk], values[chunk])
            for chunk in _chunks(trajectories, per_trajectory=per_trajectory)
        ]
        try:
            for call in asyncio.as_completed(calls):
                self._count(await call)
        finally:
            for unfinished in calls:
                unfinished.cancel()

    def _score_chunk(self, trajectories: Sequence[Trajectory], values: Values) -> Values:
        """Fill in the values of the isolated components, in a thread with exclusive use of one worker."""
        worker = self._free.get()
        try:
            for component in self._isolated:
                _record(values, component.name, self._call(worker, component, trajectories))
        except LoadError as error:
            raise RunError(f"A reward worker cannot load {component.name}: {error}.") from error
        finally:
            self._free.put(worker)
        return values

    def _call(self, worker: WorkerProcess, component: RewardComponent, trajectories: Sequence[Trajectory]) -> Outcome:
        """Call once for all trajectories; if that fails, retry each alone, so that only the offending one fails."""
        limit_s = self._config.timeout_s
        outcome = worker.call(component.name, trajectories, limit_s)
        if len(trajectories) == 1 or not isinstance(outcome, Failure):
            return outcome

        worker.retried += len(trajectories)
        values: list[Value] = []
        for trajectory in trajectories:
            single = worker.call(component.name, [trajectory], limit_s)
            values.extend([single] if isinstance(single, Failure) else single)
        return values

    def _count(self, values: Values) -> None:
        for by_component in values:
            self._failure_tracker.count(by_component)

    def _with_reward(self, trajectory: Trajectory, values: dict[str, Value]) -> Trajectory:
        scores = {name: 0.0 if isinstance(value, Failure) else value for name, value in values.items()}
        failed = any(isinstance(value, Failure) for value in values.values())
        total = sum(component.weight * scores[component.name] for component in self._components)
        return replace(trajectory, reward=0.0 if failed else total, reward_components=scores)


def require(config: RewardConfig) -> None:
    """Raise `ConfigError` if the custom reward cannot be loaded; tried in a worker process, as in a run."""
    if config._target_ is not None:
        Scorer(replace(config, workers=1), log=Path(os.devnull)).close()


def _components_of(config: RewardConfig) -> list[RewardComponent]:
    if config._target_ is not None:
        return [custom(config._target_, config.args)]
    return [built_in(name, weight) for name, weight in config.components.items()]


def _chunks(trajectories: Sequence[Trajectory], *, per_trajectory: bool) -> Iterator[slice]:
    """Yield runs of one prompt's trajectories, or single trajectories, which spread over all workers."""
    start = 0
    for _, run in groupby(trajectories, key=lambda trajectory: trajectory.prompt.id):
        length = len(list(run))
        size = 1 if per_trajectory else length
        for begin in range(start, start + length, size):
            yield slice(begin, begin + size)
        start += length


def _record(values: Values, name: str, outcome: Outcome) -> None:
    """Fill in the outcome of one component. The dictionaries are shared with the caller's list."""
    results = [outcome] * len(values) if isinstance(outcome, Failure) else outcome
    for by_component, value in zip(values, results, strict=True):
        by_component[name] = value

"""Scores trajectories: the weighted sum of the reward's parts, computed where nothing can hang or kill the run.

    trajectories ─┬─ instant parts (exact, format), right here ────────────────────────┬─→ reward, reward_components
                  └─ other parts → a free worker process, killed and replaced when late ┘

Always holds: every trajectory gets a finite reward. One whose reward failed gets 0, and its failure is counted; once
more than `max_failed_fraction` of a step's trajectories have failed, scoring raises a `RunError`.
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
from app.reward import component as parts
from app.reward.component import LoadError, RewardComponent, RewardFunction
from app.reward.failure_tracker import FailureTracker
from app.reward.outcome import Failure, FailureKind, Outcome, Value, evaluate
from app.reward.worker_process import WorkerProcess
from app.types import Trajectory

Values = list[dict[str, Value]]  # of each trajectory, by part


class Scorer:
    """Any number of `score` calls may be in flight. Close it at the end.

    `step_trajectories` is how many trajectories a step scores: the window over which failures are judged. `log` gets
    what workers print (null: our stderr). A user's own reward that cannot be loaded is a `ConfigError` here.
    """

    def __init__(self, config: RewardConfig, *, step_trajectories: int = 128, log: Path | None = None) -> None:
        self._config = config
        self._tally = FailureTracker(config.max_failed_fraction, step_trajectories)
        self._parts = _parts_of(config)
        self._isolated = [part for part in self._parts if part.isolated]
        self._here: dict[str, RewardFunction] = {part.name: part.load() for part in self._parts if not part.isolated}
        self._workers = [WorkerProcess(self._isolated, log) for _ in range(config.workers if self._isolated else 0)]
        self._free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        if self._workers:
            self._start_workers()

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same trajectories, in their order, with `reward` and `reward_components` (unweighted) filled in.

        A user's own reward is called with the trajectories that share a prompt and follow each other. `RunError` once
        too large a part of a step's trajectories has failed.
        """
        values: Values = [{} for _ in trajectories]
        for name, reward in self._here.items():
            _note(values, name, evaluate(reward, trajectories, None))
        if self._threads is None:
            self._count(values)
        else:
            await self._score_isolated(trajectories, values, self._threads)
        return [self._scored(trajectory, found) for trajectory, found in zip(trajectories, values, strict=True)]

    def check(self) -> None:
        """Judge the failures at the end of a step, also of one with fewer trajectories than announced: `RunError`."""
        self._tally.check()

    @property
    def failures(self) -> dict[FailureKind, int]:
        """Failed trajectories so far, by kind."""
        return self._tally.failures

    @property
    def metrics(self) -> dict[str, float]:
        """`reward/failed_timeout`, `_exception`, `_value`, `_died` (trajectories so far), `reward/failed_fraction`."""
        return self._tally.metrics

    def close(self) -> None:
        """End the workers. A `score` in flight ends with failures."""
        for worker in self._workers:
            worker.close()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def _start_workers(self) -> None:
        """Start all of them in the background; only a user's own reward, which may not be loadable, is waited for."""
        # the kernel kills a worker when the thread that started it ends: these threads live as long as we do
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="reward")
        started = [self._threads.submit(self._prepare, worker) for worker in self._workers]
        target = self._config._target_
        if target is None:
            return
        try:
            for start in started:
                start.result()
        except (LoadError, RunError) as error:
            self.close()
            accepted = "a function or class that can be called with a list of trajectories"
            raise ConfigError(f"reward._target_={target} is not accepted: give {accepted}; {error}.") from error

    def _prepare(self, worker: WorkerProcess) -> None:
        """In a thread: start a worker, then offer it, so that it is never in two hands."""
        try:
            worker.start()
        finally:
            self._free.put(worker)

    async def _score_isolated(
        self, trajectories: Sequence[Trajectory], values: Values, threads: ThreadPoolExecutor
    ) -> None:
        loop = asyncio.get_running_loop()
        chunks = [
            loop.run_in_executor(threads, self._score_chunk, trajectories[chunk], values[chunk])
            for chunk in _chunks(trajectories, alone=all(part.alone for part in self._isolated))
        ]
        try:
            for done in asyncio.as_completed(chunks):
                self._count(await done)
        finally:
            for chunk in chunks:
                chunk.cancel()

    def _score_chunk(self, trajectories: Sequence[Trajectory], values: Values) -> Values:
        """In a thread: fill in the values of isolated parts, with a worker to ourselves."""
        worker = self._free.get()
        try:
            for part in self._isolated:
                _note(values, part.name, self._ask(worker, part, trajectories))
        except LoadError as error:
            raise RunError(f"A reward worker cannot load {part.name}: {error}.") from error
        finally:
            self._free.put(worker)
        return values

    def _ask(self, worker: WorkerProcess, part: RewardComponent, trajectories: Sequence[Trajectory]) -> Outcome:
        """A call for all; if that failed as a whole, one for each, so that only the guilty trajectory fails."""
        if len(trajectories) == 1 or not part.alone:
            outcome = worker.ask(part.name, trajectories, self._config.timeout_s)
            if len(trajectories) == 1 or not isinstance(outcome, Failure):
                return outcome
        values: list[Value] = []
        for trajectory in trajectories:
            single = worker.ask(part.name, [trajectory], self._config.timeout_s)
            values.extend([single] if isinstance(single, Failure) else single)
        return values

    def _count(self, values: Values) -> None:
        for found in values:
            self._tally.count(found)

    def _scored(self, trajectory: Trajectory, found: dict[str, Value]) -> Trajectory:
        failed = any(isinstance(value, Failure) for value in found.values())
        plain = {name: 0.0 if isinstance(value, Failure) else value for name, value in found.items()}
        total = 0.0 if failed else sum(part.weight * plain[part.name] for part in self._parts)
        return replace(trajectory, reward=total, reward_components=plain)


def require(config: RewardConfig) -> None:
    """Raise `ConfigError` where a user's own reward cannot be loaded; tried in a process of its own, as in a run."""
    if config._target_ is not None:
        Scorer(replace(config, workers=1), log=Path(os.devnull)).close()


def _parts_of(config: RewardConfig) -> list[RewardComponent]:
    if config._target_ is not None:
        return [parts.own(config._target_, config.args)]
    return [parts.built_in(name, weight) for name, weight in config.components.items()]


def _chunks(trajectories: Sequence[Trajectory], *, alone: bool) -> Iterator[slice]:
    """Runs of one prompt's trajectories; with `alone`, single trajectories, which spread over all workers."""
    start = 0
    for _, run in groupby(trajectories, key=lambda trajectory: trajectory.prompt.id):
        length = len(list(run))
        step = 1 if alone else length
        for begin in range(start, start + length, step):
            yield slice(begin, begin + step)
        start += length


def _note(values: Values, name: str, outcome: Outcome) -> None:
    """Fill in a part's outcome; the dictionaries are shared with the caller's list."""
    found = [outcome] * len(values) if isinstance(outcome, Failure) else outcome
    for noted, value in zip(values, found, strict=True):
        noted[name] = value

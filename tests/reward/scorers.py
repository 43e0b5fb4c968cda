"""A scorer for the length of a test, on an event loop of its own, and what it says."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from app.config.reward import RewardConfig
from app.reward.scorer import Scorer
from app.types import Trajectory

TOWER = "\\boxed{9^{9^{9^{9}}}}"


class RunningScorer(Scorer):
    """A scorer that has started."""

    runner: asyncio.Runner

    def scored(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return self.runner.run(self.score(trajectories))


@contextlib.contextmanager
def running_scorer(step_trajectories: int = 1000, log=None, warned=None, **settings) -> Iterator[RunningScorer]:
    warn = [].append if warned is None else warned.append
    with asyncio.Runner() as runner:
        scorer = RunningScorer(RewardConfig(**settings), step_trajectories=step_trajectories, log=log, warn=warn)
        scorer.runner = runner
        try:
            runner.run(scorer.start())
            yield scorer
        finally:
            scorer.close()


def score(scorer: RunningScorer, trajectories) -> list[float]:
    return [scored.reward for scored in scorer.scored(trajectories)]


def pids(scorer: Scorer) -> list[int]:
    return [pid for pool in scorer.pools for pid in pool.pids]


def failed(scorer: Scorer) -> dict[str, int]:
    return {kind.name: count for kind, count in scorer.failures.items() if count}

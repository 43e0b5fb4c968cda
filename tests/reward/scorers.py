"""A scorer for the length of a test, and what it says."""

import asyncio
import contextlib
from collections.abc import Iterator

from app.config.reward import RewardConfig
from app.reward.scorer import Scorer

TOWER = "\\boxed{9^{9^{9^{9}}}}"


@contextlib.contextmanager
def running_scorer(step_trajectories: int = 1000, log=None, warned=None, **settings) -> Iterator[Scorer]:
    warn = [].append if warned is None else warned.append
    scorer = Scorer(RewardConfig(**settings), step_trajectories=step_trajectories, log=log, warn=warn)
    try:
        yield scorer
    finally:
        scorer.close()


def score(scorer: Scorer, trajectories) -> list[float]:
    return [scored.reward for scored in asyncio.run(scorer.score(trajectories))]


def pids(scorer: Scorer) -> list[int]:
    return [pid for pool in scorer.pools for pid in pool.pids]


def failed(scorer: Scorer) -> dict[str, int]:
    return {kind.name: count for kind, count in scorer.failures.items() if count}

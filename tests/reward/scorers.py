"""A scorer for the length of a test, on an event loop of its own."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.config.reward import RewardConfig
from app.reward.component import FailureKind
from app.reward.scorer import Scorer
from app.types import Completion, FinishReason, Prompt, Trajectory, VersionSpan

TOKENS = 8
OWN = "tests.reward.broken"
TOWER = "\\boxed{9^{9^{9^{9}}}}"


class RunningScorer(Scorer):
    """A scorer that has started."""

    runner: asyncio.Runner

    def scored(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return self.runner.run(self.score(trajectories))


@contextlib.contextmanager
def running_scorer(
    step_trajectories: int = 1000, log: Path | None = None, warned: list[str] | None = None, **settings: Any
) -> Iterator[RunningScorer]:
    warnings: list[str] = [] if warned is None else warned
    with asyncio.Runner() as runner:
        config = RewardConfig(**settings)
        scorer = RunningScorer(config, step_trajectories=step_trajectories, log=log, warn=warnings.append)
        scorer.runner = runner
        try:
            runner.run(scorer.start())
            yield scorer
        finally:
            scorer.close()


def trajectory(text: str, answer: str = "42", prompt_id: str = "set/0@0", **columns: object) -> Trajectory:
    """A completion with this text, for a prompt with this answer."""
    prompt = Prompt(prompt_id, np.zeros(4, np.int32), answer, "set", question="what is it?", row=columns)
    completion = Completion(
        token_ids=np.zeros(TOKENS, np.int32),
        logprobs=np.zeros(TOKENS, np.float32),
        finish_reason=FinishReason.stop,
        spans=(VersionSpan(0, 0, TOKENS),),
    )
    return Trajectory(prompt, completion, text)


def score(scorer: RunningScorer, trajectories: Sequence[Trajectory]) -> list[float]:
    return [scored.reward for scored in scorer.scored(trajectories)]


def pids(scorer: Scorer) -> list[int]:
    return [pid for pool in scorer.pools for pid in pool.pids]


def failed(scorer: Scorer) -> dict[str, int]:
    """Failed trajectories by kind."""
    counts = {name.removeprefix("reward/failed_"): int(value) for name, value in scorer.metrics.items()}
    return {kind: counts[kind] for kind in FailureKind.__members__ if counts[kind]}

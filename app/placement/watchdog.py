"""Ends a run that makes no progress, with the stacks of all tasks in `logs/stacks.log`.

Single calls have their own deadlines (an engine's progress, a call of the trainer, a phase of a sync). The watchdog
covers what they do not. Progress is any of these:

    - a group finishes, for training or for evaluation
    - a call of an engine or of the trainer returns, or an engine is replaced
    - an environment requests a turn, ends or fails
    - the engines sample tokens, however long the completion
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from app.config import RunConfig
from app.environment import pool as environment_pool
from app.errors import EngineError, RunError
from app.protocols import RolloutEngine
from app.recovery.engine_supervisor import MAX_BACKOFF_S
from app.reward import reward_pool
from app.rollout.engine.pool import EnginePool
from app.rollout.engine.remote import CALL_TIMEOUT_S, END_TIMEOUT_S, START_GRACE_S
from app.utils.tasks import task_group, task_stacks
from app.worker.remote import ABORT_TIMEOUT_S, SILENCE_TIMEOUT_S

POLL_INTERVAL_S = 15.0
STATS_TIMEOUT_S = 10.0  # deadline of an engine to report its tokens; without a report they count as unchanged
MARGIN_S = 60.0  # a call's own deadline passes first: its error is more exact


class Watched(Protocol):
    """A run whose progress is watched."""

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes when the run makes progress."""

    def describe(self) -> str:
        """Describe what the run is waiting for, in one line."""


@asynccontextmanager
async def watchdog(run: Watched, pool: EnginePool, config: RunConfig, folder: Path) -> AsyncIterator[None]:
    """Cancel the block and raise `RunError` when it makes no progress for `limit_seconds`."""
    async with task_group() as tasks:
        watcher = tasks.create_task(_watch(run, pool, limit_seconds(config), folder), name="watchdog")
        yield
        watcher.cancel()


def limit_seconds(config: RunConfig) -> float:
    """Return the seconds without progress that end a run: more than any single call may take."""
    group_size = max(config.algorithm.group_size, config.eval.samples)
    # together, then one by one; each that hangs costs its worker, which is started again
    rewards = group_size * (2 * config.reward.timeout_s + reward_pool.START_TIMEOUT_S)
    restart = config.rollout.start_timeout_s + START_GRACE_S + END_TIMEOUT_S + MAX_BACKOFF_S
    # between two messages of environments: a step, its abort and a new worker
    step = config.environment.timeout_s + SILENCE_TIMEOUT_S
    abort = 2 * config.environment.timeout_s + ABORT_TIMEOUT_S
    episode = step + abort + environment_pool.START_TIMEOUT_S if config.environment.multi_turn else 0.0
    deadlines = (
        config.trainer.timeout_s,
        config.rollout.stall_timeout_s,
        config.weight_sync.timeout_s,
        CALL_TIMEOUT_S,
        restart,
        rewards,
        episode,
        config.teacher.limit_s,
    )
    return max(deadlines) + MARGIN_S


async def _watch(run: Watched, pool: EnginePool, limit: float, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    progress: tuple[object, ...] = ()
    tokens: dict[str, tuple[int, int]] = {}
    changed_at = loop.time()
    while True:
        before = progress, tokens
        progress = run.progress
        if progress == before[0]:  # only then: the calls cost the driver CPU time
            tokens = tokens | await _sampled_by_engine(pool)

        if (progress, tokens) != before:
            changed_at = loop.time()
        elif loop.time() - changed_at > limit:
            path = folder / "logs" / "stacks.log"
            with contextlib.suppress(OSError):  # a full disk must not hide the error below
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(task_stacks(), encoding="utf-8")
            raise RunError(f"no progress for {limit:.0f} s: {run.describe()}; stacks: {path}")
        await asyncio.sleep(POLL_INTERVAL_S)


async def _sampled_by_engine(pool: EnginePool) -> dict[str, tuple[int, int]]:
    """Return numbers that change while an engine samples; engines that do not answer are left out."""

    async def sampled(engine: RolloutEngine) -> tuple[int, int] | None:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await engine.stats()
                return stats.completion_tokens, stats.beats
        except (EngineError, TimeoutError):
            return None

    engines = pool.alive
    counts = await asyncio.gather(*(sampled(engine) for engine in engines))
    return {engine.name: count for engine, count in zip(engines, counts, strict=True) if count is not None}

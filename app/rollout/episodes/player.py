"""The driver's side of episodes: environments request tokens, engines sample them.

    environment worker ── SampleRequest: all tokens of a sequence ──→ the group's engine
                       ←─ Answer: sampled tokens ── kept with their log-probabilities ←┘
                       ── End: scores, turns ──→ Trajectory: what was sampled, joined by sequence

Invariants:
- The driver handles tokens and never text.
- An episode ends exactly once: as a trajectory, failed, or aborted. Its environment is closed then.
- A failed environment is never a reward: the episode is played again, and then left out of its group.
"""

import asyncio
import zlib
from collections.abc import Sequence
from functools import partial

from app.environment.pool import EnvironmentPool
from app.environment.protocol import Task
from app.rollout.engine.pool import EnginePool
from app.rollout.episodes.attempt import EpisodeAttempt, EpisodeLimits, played
from app.rollout.episodes.episode_group import EpisodeGroup, GroupSpec
from app.rollout.requests import Requests
from app.types import Trajectory
from app.worker.failures import FailureWindow
from app.worker.wire import Failed


class Episodes:
    """Plays the episodes of groups. The members of a group have the same seed, which follows from the run's."""

    def __init__(self, environments: EnvironmentPool, limits: EpisodeLimits, failures: FailureWindow, seed: int):
        self.environments = environments
        self.limits = limits
        self.failures = failures
        self.seed = seed
        self.progress = 0  # messages of environments so far
        self._groups: dict[str, EpisodeGroup] = {}  # by prompt id

    async def play(self, spec: GroupSpec, pool: EnginePool, requests: Requests) -> list[Trajectory]:
        """Return the trajectories of a group, without those that failed. Raises as `Rollouter.group`."""
        with pool.sticky_engine(spec.size) as sticky_engine:
            group = EpisodeGroup(spec, sticky_engine, requests)
            self._groups[spec.prompt.id] = group
            try:
                await group.run(self._member)
            finally:
                del self._groups[spec.prompt.id]
        return [group.trajectories[number] for number in sorted(group.trajectories)]

    def abort(self, prompt_ids: Sequence[str]) -> None:
        """Let the `play` of these prompts raise `Aborted`, whatever its episodes do."""
        for prompt_id in prompt_ids:
            if prompt_id in self._groups:
                self._groups[prompt_id].abort()

    async def _member(self, group: EpisodeGroup, number: int) -> None:
        trajectory = await played(partial(self._attempt, group, number), self.failures, self.limits.retries)
        if trajectory is not None:
            group.trajectories[number] = trajectory

    async def _attempt(self, group: EpisodeGroup, number: int) -> Trajectory | Failed:
        prompt, training = group.spec.prompt, group.spec.training
        seed = zlib.crc32(f"{self.seed}/{prompt.id}".encode())
        row = dict(prompt.row)
        task = Task(prompt.id, prompt.question, prompt.answer, prompt.source, row, seed, training, prompt.messages)

        session = await self.environments.begin(task, prompt.token_ids.tolist())
        episode = EpisodeAttempt(group, number, session, self.limits)
        cancelled = False
        try:
            return await episode.run(self._on_message)
        except asyncio.CancelledError:
            cancelled = not group.aborted  # the run ends, or restarts its trainer
            raise
        finally:
            await session.close(force=cancelled)

    def _on_message(self) -> None:
        self.progress += 1

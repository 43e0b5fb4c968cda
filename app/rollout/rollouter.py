"""One group from its prompt: sample, decode, score. Used by both placements and by evaluation."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.config.recovery import RecoveryConfig
from app.protocols import RolloutEngine
from app.reward.scorer import Scorer
from app.rollout.engine.pool import EnginePool
from app.rollout.episodes import Episodes, GroupSpec
from app.rollout.requests import Requests
from app.tracking.run_folder.timeline import Timeline
from app.types import Group, GroupRequest, Prompt, Sampling, Trajectory
from app.utils.tasks import gather_or_raise

MAX_PROMPTS_SHOWN = 5  # in messages


@dataclass(eq=False)
class Rollouter:
    """Turns prompts into groups with rewards."""

    pool: EnginePool
    scorer: Scorer
    tokenizer: Any
    timeline: Timeline
    recovery: RecoveryConfig
    episodes: Episodes | None = None  # plays those of an environment; None: every trajectory is a single turn
    teacher: Callable[[Group], Awaitable[Group]] | None = None  # adds log-probabilities to what is trained on
    finished: int = 0  # groups

    def __post_init__(self) -> None:
        self.requests = Requests(self.timeline, self.recovery)

    async def group(
        self,
        prompt: Prompt,
        *,
        size: int,
        sampling: Sampling,
        version: Callable[[], int],
        on_sent: Callable[[], None] = lambda: None,
        training: bool = True,
    ) -> Group:
        """Return `size` scored trajectories of one prompt, without those whose environment failed.

        Args:
            sampling: Sampling parameters of completions, or of the turns of episodes.
            version: Returns the policy version synced last.
            on_sent: Called when sampling begins. Of single turns also when it begins again: nothing is kept then.
            training: False in an evaluation.

        Raises:
            Aborted: The group was aborted on request.
            EngineError: A request failed too often.
            RunError: Environments failed too often.
        """
        try:
            if self.episodes is None:
                unscored = await self._single_turns(prompt, size, sampling, version, on_sent)
            else:
                play = GroupSpec(prompt, size, sampling, version, training, on_sent)
                unscored = await self.episodes.play(play, self.pool, self.requests)

            self.requests.in_flight[prompt.id] = "being scored"
            with self.timeline.span("score", prompt.id):
                group = Group(prompt, tuple(await self.scorer.score(unscored)))
            if training and self.teacher is not None:
                self.requests.in_flight[prompt.id] = "with the teacher"
                with self.timeline.span("teacher", prompt.id):
                    group = await self.teacher(group)
        finally:
            self.requests.in_flight.pop(prompt.id, None)
        self.finished += 1
        return group

    async def groups(
        self,
        prompts: Sequence[Prompt],
        *,
        size: int,
        sampling: Sampling,
        version: int,
        limit: int,
        training: bool = True,
    ) -> list[Group]:
        """Return the groups of these prompts, in their order, with at most `limit` in flight.

        The first failure cancels the others.
        """
        slots = asyncio.Semaphore(limit)

        async def one(prompt: Prompt) -> Group:
            async with slots:
                return await self.group(
                    prompt, size=size, sampling=sampling, version=lambda: version, training=training
                )

        return await gather_or_raise(*(one(prompt) for prompt in prompts))

    async def abort(self, prompt_ids: Sequence[str]) -> None:
        """Abort the groups of these prompts, also where an environment computes: their `group` raises `Aborted`."""
        if self.episodes is not None:
            self.episodes.abort(prompt_ids)
        await self.pool.each(RolloutEngine.abort, prompt_ids)

    def pop_lost(self) -> int:
        """Return the number of groups that were sent again after their engine was lost, since the last call."""
        lost = len(self.requests.lost)
        self.requests.lost.clear()
        return lost

    @property
    def failure_metrics(self) -> dict[str, float]:
        """Failed episodes so far; nothing without an environment."""
        if self.episodes is None:
            return {}
        failures = self.episodes.failures
        return {**failures.metrics, "environment/failed_episodes": float(failures.failed)}

    @property
    def last_failure(self) -> str:
        return self.episodes.failures.last if self.episodes else ""

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes when a group finishes, a call of an engine returns, or an environment answers."""
        return self.finished, self.pool.progress, self.episodes.progress if self.episodes else 0

    def describe(self) -> str:
        in_flight = self.requests.in_flight
        places = [f"{prompt_id} {place}" for prompt_id, place in itertools.islice(in_flight.items(), MAX_PROMPTS_SHOWN)]
        shown = f" ({', '.join(places)}{', …' if len(in_flight) > MAX_PROMPTS_SHOWN else ''})" if places else ""
        return f"{len(in_flight)} groups in flight{shown}, {self.pool.describe()}"

    async def _single_turns(
        self, prompt: Prompt, size: int, sampling: Sampling, version: Callable[[], int], on_sent: Callable[[], None]
    ) -> list[Trajectory]:
        def send_version() -> int:
            on_sent()
            return version()

        request = GroupRequest(prompt.id, prompt.token_ids, size, sampling, version())
        trajectories = []
        for completion in await self.requests.send(request, send_version, partial(self.pool.least_busy, size)):
            text = self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
            trajectories.append(Trajectory(prompt, completion, text))
        return trajectories

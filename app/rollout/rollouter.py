"""One group from its prompt: sample, decode, score. Used by both placements and by evaluation."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from app.config.recovery import RecoveryConfig
from app.errors import EngineError, EngineLost
from app.reward.scorer import Scorer
from app.rollout.client import ConnectionLost
from app.rollout.pool import EnginePool
from app.tracking.run_folder.timeline import Timeline
from app.types import Completion, FinishReason, Group, GroupRequest, Prompt, Sampling, Trajectory

RETRY_SECONDS = 0.25  # before a prompt is sent again; doubled each time


class Aborted(EngineError):
    """Completions of a prompt were aborted, by us or by the engine. They are partial and never trained on."""


class Rollouter:
    """Turns prompts into groups with rewards.

    A prompt whose engine is lost, or that an engine refuses, is sent again with exponential backoff, up to
    `recovery.max_engine_failures` and `recovery.max_prompt_retries` times.

    Attributes:
        finished: Groups finished so far; watchdogs read it as progress.
        lost: Groups that were sent again after their engine was lost, since `take_lost`.
    """

    def __init__(self, pool: EnginePool, scorer: Scorer, tokenizer: Any, timeline: Timeline, recovery: RecoveryConfig):
        self.pool = pool
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.timeline = timeline
        self.recovery = recovery
        self.finished = 0
        self.lost = 0

    async def group(self, prompt: Prompt, *, size: int, sampling: Sampling, version: int) -> Group:
        """Return `size` scored trajectories of one prompt.

        Raises:
            Aborted: At least one completion was aborted.
            EngineError: The prompt failed too often.
        """
        completions = await self._completions(GroupRequest(prompt.id, prompt.token_ids, size, sampling, version))
        if any(completion.finish_reason is FinishReason.abort for completion in completions):
            raise Aborted(f"the completions of prompt {prompt.id} were aborted")

        trajectories = [Trajectory(prompt, completion, self._text(completion)) for completion in completions]
        with self.timeline.span("score", prompt.id):
            group = Group(prompt, tuple(await self.scorer.score(trajectories)))
        self.finished += 1
        return group

    async def groups(
        self, prompts: Sequence[Prompt], *, size: int, sampling: Sampling, version: int, limit: int
    ) -> AsyncIterator[Group]:
        """Yield the groups of these prompts as they finish, with at most `limit` in flight.

        The first failure cancels the rest.
        """
        pending = list(reversed(prompts))
        running: set[asyncio.Task[Group]] = set()
        try:
            while pending or running:
                while pending and len(running) < limit:
                    group = self.group(pending.pop(), size=size, sampling=sampling, version=version)
                    running.add(asyncio.create_task(group))

                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def take_lost(self) -> int:
        """Return `lost` and reset it to 0."""
        lost = self.lost
        self.lost = 0
        return lost

    async def _completions(self, request: GroupRequest) -> list[Completion]:
        lost = 0
        refused = 0
        while True:
            try:
                async with self.pool.least_busy(request.group_size) as (name, engine):
                    with self.timeline.span(f"generate {name}", request.prompt_id):
                        return await engine.generate(request)
            except (EngineLost, ConnectionLost) as error:
                lost += 1
                self.lost += 1
                limit = self.recovery.max_engine_failures
                if lost > limit:
                    raise EngineError(
                        f"prompt {request.prompt_id} was lost to engines {lost} times "
                        f"(recovery.max_engine_failures={limit}); last error: {error}"
                    ) from error
            except EngineError as error:
                refused += 1
                limit = self.recovery.max_prompt_retries
                if refused > limit:
                    raise EngineError(
                        f"prompt {request.prompt_id} was refused {refused} times "
                        f"(recovery.max_prompt_retries={limit}); last error: {error}"
                    ) from error

            await asyncio.sleep(RETRY_SECONDS * 2 ** (lost + refused - 1))

    def _text(self, completion: Completion) -> str:
        """Return the decoded text. Hosts of servers that we did not start leave decoding to the driver."""
        if completion.text is not None:
            return completion.text
        return self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)

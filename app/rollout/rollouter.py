"""One group from its prompt: sample, decode, score. Both placements and the evaluation use it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from app.config.recovery import RecoveryConfig
from app.errors import EngineError, EngineLost
from app.protocols import Timeline
from app.reward.scorer import Scorer
from app.rollout.client import ConnectionLost
from app.rollout.pool import EnginePool
from app.types import Completion, FinishReason, Group, GroupRequest, Prompt, Sampling, Trajectory

PAUSE_SECONDS = 0.25  # before a prompt is sent again; doubled each time


class Aborted(EngineError):
    """The completions of a prompt were aborted, by us or by the engine; they are partial and never trained on."""


class Rollouter:
    """Turns prompts into groups whose rewards are known.

    `finished` counts them: the progress that a watchdog sees. A prompt that is lost to an engine, or refused by one, is
    sent again after a pause that doubles, within the budgets of `recovery`.
    """

    def __init__(self, pool: EnginePool, scorer: Scorer, tokenizer: Any, timeline: Timeline, recovery: RecoveryConfig):
        self.pool, self.scorer, self.tokenizer, self.timeline = pool, scorer, tokenizer, timeline
        self.recovery = recovery
        self.finished = 0
        self.lost = 0  # groups that were lost to an engine and sent again

    async def group(self, prompt: Prompt, *, size: int, sampling: Sampling, version: int) -> Group:
        """`size` scored trajectories of one prompt. Raises `Aborted` if one of them was."""
        completions = await self._completions(GroupRequest(prompt.id, prompt.token_ids, size, sampling, version))
        if any(completion.finish_reason is FinishReason.abort for completion in completions):
            raise Aborted(f"the completions of prompt {prompt.id} were aborted")
        trajectories = [Trajectory(prompt, completion, self._text(completion)) for completion in completions]
        with self.timeline.span("score", prompt.id):
            group = Group(prompt, tuple(await self.scorer.score(trajectories)))
        self.finished += 1
        return group

    async def _completions(self, request: GroupRequest) -> list[Completion]:
        lost = refused = 0
        while True:
            try:
                async with self.pool.least_busy(request.group_size) as (name, engine):
                    with self.timeline.span(f"generate {name}", request.prompt_id):
                        return await engine.generate(request)
            except (EngineLost, ConnectionLost) as error:
                lost += 1
                self.lost += 1
                _check_budget(request, "lost to engines", lost, "max_engine_failures", self.recovery, error)
            except EngineError as error:
                refused += 1
                _check_budget(request, "refused", refused, "max_prompt_retries", self.recovery, error)
            await asyncio.sleep(PAUSE_SECONDS * 2 ** (lost + refused - 1))

    def take_lost(self) -> int:
        """Groups lost since this was asked last."""
        lost, self.lost = self.lost, 0
        return lost

    def _text(self, completion: Completion) -> str:
        """Hosts of servers that we did not start leave the decoding to us."""
        if completion.text is not None:
            return completion.text
        return self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)

    async def groups(
        self, prompts: Sequence[Prompt], *, size: int, sampling: Sampling, version: int, limit: int
    ) -> AsyncIterator[Group]:
        """The groups of these prompts as they finish, at most `limit` in flight. The first failure cancels the rest."""
        waiting = list(reversed(prompts))
        running: set[asyncio.Task[Group]] = set()
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    one = self.group(waiting.pop(), size=size, sampling=sampling, version=version)
                    running.add(asyncio.create_task(one))
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def _check_budget(
    request: GroupRequest, what: str, times: int, budget: str, recovery: RecoveryConfig, error: EngineError
) -> None:
    """Raise the error that ends the run when a prompt failed too often."""
    limit = getattr(recovery, budget)
    if times > limit:
        raise EngineError(
            f"prompt {request.prompt_id} was {what} {times} times (recovery.{budget}={limit}); the last time: {error}"
        ) from error

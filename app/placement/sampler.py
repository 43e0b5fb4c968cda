"""One group from its prompt: sample, decode, score. Both placements and the evaluation use it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from app.errors import EngineError
from app.reward.scorer import Scorer
from app.rollout.pool import EnginePool
from app.tracking.timeline import Timeline
from app.types import Completion, FinishReason, Group, GroupRequest, Prompt, Sampling, Trajectory


class Aborted(EngineError):
    """The completions of a prompt were aborted, by us or by the engine; they are partial and never trained on."""


class Sampler:
    """Turns prompts into groups whose rewards are known. `finished` counts them: the progress that a watchdog sees."""

    def __init__(self, pool: EnginePool, scorer: Scorer, tokenizer: Any, timeline: Timeline):
        self.pool, self.scorer, self.tokenizer, self.timeline = pool, scorer, tokenizer, timeline
        self.finished = 0

    async def group(self, prompt: Prompt, *, size: int, sampling: Sampling, version: int) -> Group:
        """`size` scored trajectories of one prompt. Raises `Aborted` if one of them was."""
        with self.timeline.span("generate", prompt.id):
            completions = await self.pool.generate(GroupRequest(prompt.id, prompt.token_ids, size, sampling, version))
        if any(completion.finish_reason is FinishReason.abort for completion in completions):
            raise Aborted(f"the completions of prompt {prompt.id} were aborted")
        trajectories = [Trajectory(prompt, completion, self._text(completion)) for completion in completions]
        with self.timeline.span("score", prompt.id):
            group = Group(prompt, tuple(await self.scorer.score(trajectories)))
        self.finished += 1
        return group

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

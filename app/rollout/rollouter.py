"""One group from its prompt: sample, decode, score. Used by both placements and by evaluation."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from app.config.recovery import RecoveryConfig
from app.errors import EngineError, EngineLost
from app.protocols import Timeline
from app.reward.scorer import Scorer
from app.rollout.client import ConnectionLost
from app.rollout.pool import EnginePool
from app.types import Completion, FinishReason, Group, GroupRequest, Prompt, Sampling, Trajectory

RETRY_SECONDS = 0.25  # before a prompt is sent again; doubled each time
MOST_DOUBLINGS = 7
SHOWN_PROMPTS = 5  # in messages


class Aborted(EngineError):
    """Completions of a prompt were aborted on request. They are partial and never trained on.

    Attributes:
        tokens: Completion tokens of the group that were sampled.
    """

    def __init__(self, prompt_id: str, tokens: int):
        super().__init__(f"the completions of prompt {prompt_id} were aborted after {tokens} tokens")
        self.tokens = tokens


class Rollouter:
    """Turns prompts into groups with rewards.

    A prompt whose engine is lost, or that an engine refuses or aborts by itself, is sent again with exponential
    backoff, up to `recovery.max_engine_failures` and `recovery.max_prompt_retries` times.

    Attributes:
        finished: Groups finished so far.
        lost: Groups that were sent again after their engine was lost, since `take_lost`.
        in_flight: Prompt id → where its group is ("on engine 0"), oldest first.
    """

    def __init__(self, pool: EnginePool, scorer: Scorer, tokenizer: Any, timeline: Timeline, recovery: RecoveryConfig):
        self.pool = pool
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.timeline = timeline
        self.recovery = recovery
        self.finished = 0
        self.lost = 0
        self.in_flight: dict[str, str] = {}

    async def group(self, prompt: Prompt, *, size: int, sampling: Sampling, version: Callable[[], int]) -> Group:
        """Return `size` scored trajectories of one prompt.

        Args:
            prompt: The prompt.
            size: Completions.
            sampling: Their sampling parameters.
            version: Called each time the prompt is sent to an engine; returns the policy version synced last.

        Raises:
            Aborted: At least one completion was aborted on request.
            EngineError: The prompt failed too often.
        """
        try:
            request = GroupRequest(prompt.id, prompt.token_ids, size, sampling, version())
            completions = await self._completions(request, version)
            if any(completion.finish_reason is FinishReason.abort for completion in completions):
                raise Aborted(prompt.id, sum(len(completion.token_ids) for completion in completions))

            self.in_flight[prompt.id] = "being scored"
            trajectories = [Trajectory(prompt, completion, self._text(completion)) for completion in completions]
            with self.timeline.span("score", prompt.id):
                group = Group(prompt, tuple(await self.scorer.score(trajectories)))
        finally:
            self.in_flight.pop(prompt.id, None)
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
                    sample = self.group(pending.pop(), size=size, sampling=sampling, version=lambda: version)
                    running.add(asyncio.create_task(sample))

                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    group = task.result()
                    running.discard(task)
                    yield group
        finally:
            for task in running:
                task.cancel()
            # Also retrieves the errors of groups that failed together with the one that is raised.
            await asyncio.gather(*running, return_exceptions=True)

    def take_lost(self) -> int:
        """Return `lost` and reset it to 0."""
        lost = self.lost
        self.lost = 0
        return lost

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes when a group finishes or a call of an engine returns."""
        return self.finished, self.pool.progress

    def situation(self) -> str:
        """Describe what is in flight and which engines are ready, in one line."""
        places = [
            f"{prompt_id} {place}" for prompt_id, place in itertools.islice(self.in_flight.items(), SHOWN_PROMPTS)
        ]
        shown = f" ({', '.join(places)}{', …' if len(self.in_flight) > SHOWN_PROMPTS else ''})" if places else ""
        return f"{len(self.in_flight)} groups in flight{shown}, {self.pool.situation()}"

    async def _completions(self, request: GroupRequest, version: Callable[[], int]) -> list[Completion]:
        lost = 0
        failed = 0
        while True:
            self.in_flight[request.prompt_id] = "waiting for an engine"
            try:
                return await self._sample(request, version)
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
                failed += 1
                limit = self.recovery.max_prompt_retries
                if failed > limit:
                    raise EngineError(
                        f"engines refused or aborted prompt {request.prompt_id} {failed} times "
                        f"(recovery.max_prompt_retries={limit}); last error: {error}"
                    ) from error

            self.in_flight[request.prompt_id] = "waiting to be sent again"
            await asyncio.sleep(RETRY_SECONDS * 2 ** min(lost + failed - 1, MOST_DOUBLINGS))

    async def _sample(self, request: GroupRequest, version: Callable[[], int]) -> list[Completion]:
        async with self.pool.least_busy(request.group_size) as (name, engine):
            self.in_flight[request.prompt_id] = f"on {name}"
            with self.timeline.span(f"generate {name}", request.prompt_id):
                return await engine.generate(replace(request, version=version()))

    def _text(self, completion: Completion) -> str:
        """Return the decoded text. Hosts of servers that we did not start leave decoding to the driver."""
        if completion.text is not None:
            return completion.text
        return self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)

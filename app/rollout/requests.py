"""How completions are sampled, and sending requests to engines until they are answered.

A request whose engine is lost, or that an engine refuses or aborts by itself, is sent again with exponential backoff,
up to `recovery.max_engine_failures` times.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from app.config.recovery import RecoveryConfig
from app.config.rollout import RolloutConfig
from app.errors import EngineError, EngineLost
from app.protocols import RolloutEngine
from app.rollout.engine.client import ConnectionLost
from app.tracking.run_folder.timeline import Timeline
from app.types import Completion, FinishReason, GroupRequest, Sampling

RETRY_DELAY_S = 0.25  # before a request is sent again; doubled each time
MAX_DOUBLINGS = 7
Engine = Callable[[], AbstractAsyncContextManager[tuple[str, RolloutEngine]]]  # name and engine, for one call


class Aborted(EngineError):
    """Completions of a prompt were aborted on request. They are partial and never trained on."""

    def __init__(self, prompt_id: str, tokens: int):
        super().__init__(f"the completions of prompt {prompt_id} were aborted after {tokens} tokens")
        self.tokens = tokens  # completion tokens of the group that were sampled


class Requests:
    """The requests of a run."""

    def __init__(self, timeline: Timeline, recovery: RecoveryConfig):
        self.timeline = timeline
        self.recovery = recovery
        self.lost: set[str] = set()  # prompts with a request resent after an engine failure, since `Rollouter.pop_lost`
        self.in_flight: dict[str, str] = {}  # prompt id → where its group is ("on engine 0"), oldest first
        self.completions = self.retractions = 0  # so far; the latter of completions, by full KV caches

    async def send(self, request: GroupRequest, version: Callable[[], int], engine: Engine) -> list[Completion]:
        """Send a request, with retries, and return its completions. None of them is partial.

        Args:
            version: Called each time the request is sent; returns the policy version synced last.
            engine: Called each time the request is sent; yields the engine to use.

        Raises:
            Aborted: At least one completion was aborted on request.
            EngineError: The request failed too often.
        """
        failed = 0
        while True:
            self.in_flight[request.prompt_id] = "waiting for an engine"
            try:
                async with engine() as (name, ready):
                    self.in_flight[request.prompt_id] = f"on {name}"
                    with self.timeline.span(f"generate {name}", request.name):
                        completions = await ready.generate(replace(request, version=version()))
            except EngineError as error:
                failed += 1
                if isinstance(error, EngineLost | ConnectionLost):
                    self.lost.add(request.prompt_id)
                limit = self.recovery.max_engine_failures
                if failed > limit:
                    raise EngineError(
                        f"prompt {request.name} failed on engines {failed} times "
                        f"(recovery.max_engine_failures={limit}); last error: {error}"
                    ) from error
            else:
                self.completions += len(completions)
                self.retractions += sum(completion.retractions for completion in completions)
                if any(completion.finish_reason is FinishReason.abort for completion in completions):
                    raise Aborted(request.prompt_id, sum(len(completion.token_ids) for completion in completions))
                return completions

            self.in_flight[request.prompt_id] = "waiting to be sent again"
            await asyncio.sleep(RETRY_DELAY_S * 2 ** min(failed - 1, MAX_DOUBLINGS))


def sampling_of(rollout: RolloutConfig) -> Sampling:
    """Return how completions are sampled in training."""
    return Sampling(rollout.temperature, rollout.top_p, rollout.max_completion_tokens, stop=tuple(rollout.stop))

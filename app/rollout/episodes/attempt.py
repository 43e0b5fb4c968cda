"""The attempts of an episode: the environment requests tokens, the group's engine samples them.

Invariant: whenever a request is sent, the response tokens of all sequences and what the requests in flight may still
sample are together at most `Sampling.max_tokens`. A request reserves all that it may sample; the next one, in the order
of arrival, waits until as much is free. It never gets less because of others, and is refused only where the tokens that
were sampled and observed leave no room. A wait ends, because each request in flight ends: with its completion, or with
an error, which ends the attempt.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from app.environment.wire import Answer, End, SampleRequest
from app.rollout.episodes.episode_group import EpisodeGroup
from app.rollout.episodes.sampled_sequence import SampledSequence
from app.types import Completion, Ending, Episode, GroupRequest, TokenSequence, Trajectory, Turn
from app.worker.failures import FailureWindow
from app.worker.remote import Job
from app.worker.wire import Failed

MAX_LOST_ATTEMPTS = 10  # of one episode, whose worker ended because of another episode
MIN_SHOWN_S = 0.02  # a shorter stretch of an environment's own code is not on the timeline


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What a sequence may hold."""

    max_prompt_tokens: int  # of the first opening
    max_response_tokens: int  # of a trajectory after its openings, observations included
    retries: int  # attempts after the first one failed


class EpisodeAttempt:
    """One episode, from its beginning to its end."""

    def __init__(self, group: EpisodeGroup, number: int, session: Job, limits: EpisodeLimits):
        self.group = group
        self.number = number
        self.session = session
        self.limits = limits
        self.sequences: list[SampledSequence] = []
        self.completions: list[Completion] = []  # of all requests, in the order of their ends
        self.full = False  # the last completion took all room that was left
        self.requests_sent = 0
        self.prompt_tokens = 0  # over all requests
        self.engine_seconds = 0.0  # in which at least one request is out
        self._out = 0  # requests
        self._out_since = 0.0
        self._reserved = 0  # tokens that requests in flight may still sample
        self._released = asyncio.Event()  # a request in flight has ended
        self._admission = asyncio.Lock()  # first come, first served
        self._idle_since = group.requests.timeline.now()  # no request of the episode is in flight since then
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self, on_message: Callable[[], None]) -> Trajectory | Failed:
        """Answer the environment until the episode ends."""
        begun = time.perf_counter()
        try:
            while True:
                message = await self._next()
                timeline = self.group.requests.timeline
                if not self._answering and (now := timeline.now()) - self._idle_since >= MIN_SHOWN_S:
                    # what the environment just did on its own
                    member = f"{self.group.spec.prompt.id} member {self.number}"
                    timeline.add("environment", member, self._idle_since, now)
                on_message()
                match message:
                    case SampleRequest():
                        problem = self._begin(message)
                        if problem is not None:
                            return Failed(message.job, "value", problem)
                        self._answering.add(asyncio.create_task(self._answer(message)))
                    case End():
                        return self._trajectory(message, time.perf_counter() - begun)
                    case Failed():
                        return message
        finally:
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)

    async def _next(self) -> SampleRequest | End | Failed:
        """Wait for the next message. Raises what a request of the episode raised."""
        waiting = asyncio.ensure_future(self.session.next())
        try:
            while True:
                done, _ = await asyncio.wait({waiting, *self._answering}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & self._answering:
                    self._answering.discard(task)
                    task.result()
                if waiting.done():
                    return waiting.result()
        finally:
            waiting.cancel()

    def _begin(self, request: SampleRequest) -> str | None:
        """Note what a request begins with. Returns what is wrong with the first opening, if anything."""
        if request.sequence == len(self.sequences):
            self.sequences.append(SampledSequence())
        self.sequences[request.sequence].begin(request.context)

        opening = self.sequences[0].opening_tokens
        limit = self.limits.max_prompt_tokens
        longer = f"the episode opens with {opening} tokens, more than rollout.max_prompt_tokens={limit}."
        return longer if opening > limit else None

    async def _answer(self, request: SampleRequest) -> None:
        sequence = self.sequences[request.sequence]
        try:
            async with self._admission:
                reserved = await self._reserve(sequence, request.max_tokens)
            if not reserved:
                self.full = True
                self.session.reply(request, Answer(request.number, [], "full"))
                return

            try:
                completion = await self._sample(sequence, reserved)
                sequence.add(completion)
            finally:
                self._reserved -= reserved
                self._released.set()
        finally:
            self._idle_since = self.group.requests.timeline.now()

        self.full = completion.truncated and self._room(sequence) <= 0
        logprobs = completion.logprobs.tolist() if request.logprobs else None
        finish = completion.finish_reason.value
        self.session.reply(request, Answer(request.number, completion.token_ids.tolist(), finish, logprobs))

    async def _reserve(self, sequence: SampledSequence, max_tokens: int | None) -> int:
        """Reserve all tokens that a request may sample, once they are free. Returns 0 where there is no room."""
        while True:
            room = self._room(sequence)
            limit = room if max_tokens is None else min(room, max_tokens)
            if limit <= 0:
                return 0

            if limit <= self._left - self._reserved:
                self._reserved += limit
                return limit
            self._released.clear()
            await self._released.wait()

    @property
    def _left(self) -> int:
        """Tokens of the trajectory that are neither sampled nor observed yet."""
        return self.group.spec.sampling.max_tokens - sum(each.response_tokens for each in self.sequences)

    def _room(self, sequence: SampledSequence) -> int:
        """Return how many tokens may be sampled for this sequence, were no other request in flight."""
        context = self.limits.max_prompt_tokens + self.limits.max_response_tokens
        return min(self._left, context - sequence.tokens)

    async def _sample(self, sequence: SampledSequence, max_tokens: int) -> Completion:
        spec = self.group.spec
        self.group.before_request()
        self.requests_sent += 1
        request = GroupRequest(
            spec.prompt.id,
            sequence.context,
            1,
            replace(spec.sampling, max_tokens=max_tokens),
            spec.version(),
            # Unique: a request of an earlier attempt may still be in flight.
            turn=f"{self.requests_sent} of episode {self.session.number} of member {self.number}",
        )

        if not self._out:
            self._out_since = time.perf_counter()
        self._out += 1
        try:
            (completion,) = await self.group.requests.send(request, spec.version, self.group.sticky_engine.engine)
        finally:
            self._out -= 1
            if not self._out:
                self.engine_seconds += time.perf_counter() - self._out_since
        self.prompt_tokens += len(request.token_ids)
        self.completions.append(completion)
        self.group.sampled_tokens += len(completion.token_ids)
        return completion

    def _trajectory(self, end: End, seconds: float) -> Trajectory:
        spec = self.group.spec
        sequences = tuple(sequence.join() for sequence in self.sequences if sequence.is_sampled)
        nothing = Completion.nothing(spec.version())
        if not sequences:  # the policy was never called, or there was no room for a token
            context = self.sequences[0].context if self.sequences else spec.prompt.token_ids
            mask = np.zeros(len(context), dtype=bool)
            sequences = (TokenSequence(context, mask, nothing.logprobs, nothing.spans),)

        episode = Episode(
            sequences=sequences,
            turns=tuple(Turn(**turn) for turn in end.turns),
            ending=Ending.length if self.full else Ending(end.ending),
            scores=end.scores,
            metrics={
                **end.metrics,
                "turns": float(self.requests_sent),
                "sequences": float(len(self.sequences)),
                "wall_seconds": seconds,
                "engine_seconds": self.engine_seconds,
                "prompt_tokens": float(self.prompt_tokens),
                "cached_tokens": float(sum(each.cached_tokens for each in self.completions)),
                "verify_passes": float(sum(each.verify_passes for each in self.completions)),
            },
        )
        last = self.completions[-1] if self.completions else nothing
        return Trajectory(spec.prompt, last, end.text, episode=episode)


async def played(
    attempt: Callable[[], Coroutine[Any, Any, Trajectory | Failed]], failures: FailureWindow, retries: int
) -> Trajectory | None:
    """Play an episode until it ends well; None if `retries` further attempts failed as well."""
    failed = lost = 0
    while True:
        outcome = await attempt()
        if isinstance(outcome, Trajectory):
            failures.count(None)
            return outcome

        failures.by_kind[outcome.kind] += 1
        failures.warn(outcome.kind, "an episode", outcome.text)
        if outcome.kind == "lost" and lost < MAX_LOST_ATTEMPTS:  # another episode ended the worker
            lost += 1
            continue

        failed += 1
        if failed > retries:
            failures.count(outcome.text)
            return None

"""The driver's side of episodes: environments ask, engines answer, and strands grow.

    environment worker ── Ask: new tokens of a strand ──→ request of the whole strand ──→ the group's engine
                       ←─ Answer: sampled tokens ─────── strand + completion ←───────────┘
                       ── End: scores, turns ──────────→ Trajectory

Invariants:
- The driver handles tokens and never text. Each request begins with all tokens of its strand.
- An episode ends exactly once: as a trajectory, failed, or aborted. Its environment is closed then.
- A failed environment is never a reward: the episode is played again, and then left out of its group.
"""

import asyncio
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from app.environment.episode_session import EpisodeSession
from app.environment.pool import EnvironmentPool
from app.environment.protocol import Task
from app.environment.wire import Ask, End, Failed
from app.rollout.episodes.episode_failures import EpisodeFailures
from app.rollout.episodes.strand_builder import StrandBuilder
from app.rollout.pool import EnginePool, Seat
from app.rollout.requests import Aborted, Requests
from app.types import (
    Completion,
    Ending,
    Episode,
    FinishReason,
    GroupRequest,
    Prompt,
    Sampling,
    Trajectory,
    Turn,
    VersionSpan,
)
from app.utils.tasks import gather_or_raise

SHOWN_S = 0.02  # a shorter stretch of an environment's own code is not on the timeline
MOST_LOST = 10  # attempts of one episode whose worker ended because of another episode


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What a strand may hold."""

    max_prompt_tokens: int  # of the first opening
    max_response_tokens: int  # of a trajectory after its openings, observations included
    retries: int  # attempts after the first one failed

    @property
    def context(self) -> int:
        """Tokens of a strand."""
        return self.max_prompt_tokens + self.max_response_tokens


@dataclass(frozen=True, slots=True)
class Play:
    """A group to be played."""

    prompt: Prompt
    size: int
    sampling: Sampling  # max_tokens: of a trajectory
    version: Callable[[], int]  # synced last
    training: bool


class Episodes:
    """Plays the episodes of groups.

    Args:
        environments: The workers.
        limits: Of every episode.
        failures: Counts what fails.
        seed: Of the run; the members of a group have the same seed.

    Attributes:
        progress: Messages of environments so far.
    """

    def __init__(self, environments: EnvironmentPool, limits: EpisodeLimits, failures: EpisodeFailures, seed: int):
        self.environments = environments
        self.limits = limits
        self.failures = failures
        self.seed = seed
        self.progress = 0
        self._groups: dict[str, _Group] = {}  # by prompt id

    async def play(self, play: Play, pool: EnginePool, requests: Requests) -> list[Trajectory]:
        """Return the trajectories of a group, without those that failed.

        Raises:
            Aborted: The group was aborted.
            EngineError: A request failed too often.
            RunError: Environments failed too often.
        """
        with pool.seat(play.size) as seat:
            group = _Group(play, seat, requests)
            self._groups[play.prompt.id] = group
            try:
                await group.run(self._member)
            finally:
                del self._groups[play.prompt.id]
        return [group.trajectories[number] for number in sorted(group.trajectories)]

    def abort(self, prompt_ids: Sequence[str]) -> None:
        """Let the `play` of these prompts raise `Aborted`, whatever its episodes do."""
        for prompt_id in prompt_ids:
            if prompt_id in self._groups:
                self._groups[prompt_id].abort()

    async def _member(self, group: "_Group", number: int) -> None:
        """Play one episode until it ends well, or every attempt has failed."""
        charged = lost = 0
        while True:
            outcome = await self._attempt(group, number)
            if isinstance(outcome, Trajectory):
                self.failures.ended(None)
                group.trajectories[number] = outcome
                return

            self.failures.attempt_failed(outcome)
            blameless = outcome.kind == "lost" and lost < MOST_LOST
            lost += blameless
            charged += not blameless
            if charged > self.limits.retries:
                self.failures.ended(outcome)
                return

    async def _attempt(self, group: "_Group", number: int) -> Trajectory | Failed:
        prompt = group.play.prompt
        task = self._task(prompt, training=group.play.training)
        session = await self.environments.begin(task, prompt.token_ids.tolist())
        episode = _Attempt(group, number, session, self.limits)
        try:
            return await episode.run(self._on_message)
        finally:
            await session.close()

    def _task(self, prompt: Prompt, *, training: bool) -> Task:
        seed = zlib.crc32(f"{self.seed}/{prompt.id}".encode())
        return Task(prompt.id, prompt.question, prompt.answer, prompt.source, dict(prompt.row), seed, training)

    def _on_message(self) -> None:
        self.progress += 1


class _Group:
    """The episodes of one prompt that are being played."""

    def __init__(self, play: Play, seat: Seat, requests: Requests):
        self.play = play
        self.seat = seat
        self.requests = requests
        self.trajectories: dict[int, Trajectory] = {}  # by member; those that failed are missing
        self.sampled_tokens = 0
        self._aborted = False
        self._playing: asyncio.Future[None] | None = None

    async def run(self, member: Callable[["_Group", int], Coroutine[Any, Any, None]]) -> None:
        async def members() -> None:
            await gather_or_raise(*(member(self, number) for number in range(self.play.size)))

        self._playing = asyncio.ensure_future(members())
        try:
            await self._playing
        except Aborted:
            raise Aborted(self.play.prompt.id, self.sampled_tokens) from None
        except asyncio.CancelledError:
            if self._aborted:
                raise Aborted(self.play.prompt.id, self.sampled_tokens) from None
            raise

    def abort(self) -> None:
        if self._playing is not None:
            self._aborted = True
            self._playing.cancel()


class _Attempt:
    """One episode, from its beginning to its end."""

    def __init__(self, group: _Group, number: int, session: EpisodeSession, limits: EpisodeLimits):
        self.group = group
        self.number = number
        self.session = session
        self.limits = limits
        self.strands: list[StrandBuilder] = []
        self.last: Completion | None = None
        self.full = False  # the last completion took all room that was left
        self.asked = 0
        self.prompt_tokens = 0  # over all requests
        self.cached_tokens = 0
        self.engine_seconds = 0.0
        self._idle_since = group.requests.timeline.now()  # no request of the episode is in flight since then
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self, on_message: Callable[[], None]) -> Trajectory | Failed:
        """Answer the environment until the episode ends."""
        begun = time.perf_counter()
        try:
            while True:
                message = await self._next()
                self._show()
                on_message()
                match message:
                    case Ask():
                        problem = self._append(message)
                        if problem is not None:
                            return Failed(message.episode, "value", problem)
                        self._answering.add(asyncio.create_task(self._answer(message)))
                    case End():
                        return self._trajectory(message, time.perf_counter() - begun)
                    case Failed():
                        return message
        finally:
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)

    async def _next(self) -> Ask | End | Failed:
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

    def _show(self) -> None:
        """Add what the environment just did on its own to the timeline."""
        timeline = self.group.requests.timeline
        now = timeline.now()
        if not self._answering and now - self._idle_since >= SHOWN_S:
            timeline.add("environment", f"{self.group.play.prompt.id} member {self.number}", self._idle_since, now)

    def _append(self, ask: Ask) -> str | None:
        """Append to the strand. Returns what is wrong with the first opening, if anything."""
        if ask.strand == len(self.strands):
            self.strands.append(StrandBuilder())
        self.strands[ask.strand].append(ask.append)

        opening = self.strands[0].opening_tokens
        if opening <= self.limits.max_prompt_tokens:
            return None
        return (
            f"the episode opens with {opening} tokens, more than "
            f"rollout.max_prompt_tokens={self.limits.max_prompt_tokens}."
        )

    async def _answer(self, ask: Ask) -> None:
        try:
            await self._extend(ask)
        finally:
            self._idle_since = self.group.requests.timeline.now()

    async def _extend(self, ask: Ask) -> None:
        strand = self.strands[ask.strand]
        room = self._room(strand)
        if room <= 0:
            self.full = True
            self.session.answer(ask, [], "full")
            return

        most = room if ask.max_tokens is None else min(room, ask.max_tokens)
        completion = await self._sample(strand, most)
        strand.add(completion)
        self.last = completion
        self.full = completion.truncated and most == room
        self.session.answer(
            ask,
            completion.token_ids.tolist(),
            completion.finish_reason.value,
            completion.logprobs.tolist() if ask.logprobs else None,
        )

    def _room(self, strand: StrandBuilder) -> int:
        """Return how many tokens may be sampled for this strand."""
        response = sum(each.response_tokens for each in self.strands)
        return min(self.group.play.sampling.max_tokens - response, self.limits.context - strand.tokens)

    async def _sample(self, strand: StrandBuilder, max_tokens: int) -> Completion:
        play = self.group.play
        token_ids = strand.token_ids()
        self.asked += 1
        request = GroupRequest(
            play.prompt.id,
            token_ids,
            1,
            replace(play.sampling, max_tokens=max_tokens),
            play.version(),
            turn=f"{self.asked} of episode {self.session.number} of member {self.number}",  # an earlier one may linger
        )

        sent = time.perf_counter()
        (completion,) = await self.group.requests.send(request, play.version, self.group.seat.engine)
        self.engine_seconds += time.perf_counter() - sent
        self.prompt_tokens += len(token_ids)
        self.cached_tokens += completion.cached_tokens
        self.group.sampled_tokens += len(completion.token_ids)
        return completion

    def _trajectory(self, end: End, seconds: float) -> Trajectory:
        play = self.group.play
        empty = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        nothing = Completion(*empty, FinishReason.length, (VersionSpan(play.version(), 0, 0),))
        strands = [strand for strand in self.strands if strand.sampled_tokens]
        if not strands:  # the policy was never asked, or there was no room for a token
            strands = self.strands[:1] or [StrandBuilder()]
            if not strands[0].tokens:
                strands[0].append(play.prompt.token_ids.tolist())
            strands[0].add(nothing)

        episode = Episode(
            strands=tuple(strand.build() for strand in strands),
            turns=tuple(Turn(**turn) for turn in end.turns),
            ending=Ending.length if self.full else Ending(end.ending),
            scores=end.scores,
            metrics={**end.metrics, **self._metrics(seconds)},
        )
        return Trajectory(play.prompt, self.last or nothing, end.text, episode=episode)

    def _metrics(self, seconds: float) -> dict[str, float]:
        return {
            "turns": float(self.asked),
            "strands": float(len(self.strands)),
            "wall_seconds": seconds,
            "engine_seconds": self.engine_seconds,
            "prompt_tokens": float(self.prompt_tokens),
            "cached_tokens": float(self.cached_tokens),
        }

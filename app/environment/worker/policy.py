"""The policy of one episode: conversations become strands of tokens, which engines extend.

A strand is a list of tokens that only grows: what was appended, what was sampled, what was appended next. Whatever an
environment says is matched against the conversations so far by their messages (`policy(messages)`) or by their tokens
(`policy.generate`), so a reply is never tokenized again.

Invariants:
- Every sampled token is in exactly one strand as sampled. A strand that forks off another begins with its tokens as
  context.
- A strand with a request in flight is not extended by another request.
- An answer extends its strand even if whoever asked for it was cancelled, because the driver's copy has it too.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.environment.protocol import EpisodeOver, Message, OutOfTime, OutOfTokens, OutOfTurns, Reply, Sampled, Tool
from app.environment.wire import Answer, Limits
from app.environment.worker.clock import Clock
from app.environment.worker.conversation import Conversation, conversation_key, message_key, spoken
from app.environment.worker.observations import shorten

AskEngine = Callable[[int, Sequence[int], int | None, bool], Awaitable[Answer]]  # strand, append, max_tokens, logprobs


class Renderer(Protocol):
    """What this module uses of a renderer, see `app.environment.rendering`."""

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]: ...

    def following(
        self, token_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[int] | None: ...

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[Tool] | None = None
    ) -> Reply: ...


@dataclass(eq=False, slots=True)
class Strand:
    """One sequence of tokens."""

    token_ids: list[int] = field(default_factory=list)
    in_flight: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """The end of a reply: where the conversation that led to it stands in its strand."""

    strand: int
    length: int  # tokens of the strand, the reply included


@dataclass(frozen=True, slots=True)
class Place:
    """Where the next tokens go."""

    strand: int
    append: list[int]
    observed: int  # tokens of `append` that are neither an opening nor another strand's


class EpisodePolicy:
    """`protocol.Policy` of one episode.

    Args:
        ask: Has an engine extend a strand.
        renderer: Of the model.
        limits: Of the episode.
        question: The data set's question, for `turns`.
        prompt: Token ids of the data set's prompt.
        clock: Measures the environment's own time.
        url: Opens an endpoint for OpenAI clients; returns its base URL.
    """

    def __init__(
        self,
        ask: AskEngine,
        renderer: Renderer,
        limits: Limits,
        question: str,
        prompt: Sequence[int],
        clock: Clock,
        url: Callable[["EpisodePolicy"], str],
    ) -> None:
        self.strands: list[Strand] = []
        self.turns: list[dict[str, Any]] = []
        self.text = ""  # of the last reply
        self.ending: str | None = None  # of the last limit that was reached
        self.truncated = False  # the last reply
        self.metrics = {"tool_calls": 0.0, "tool_failures": 0.0, "observation_tokens": 0.0}
        self.renderer = renderer
        self._ask = ask
        self._limits = limits
        self._question = question
        self._prompt = list(prompt)
        self._clock = clock
        self._open = url
        self._base_url: str | None = None
        self._asked = 0
        self._noted_s = 0.0  # the environment's own seconds that are in `turns`
        self._said: dict[Conversation, list[Said]] = {}
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._closed = False

    async def __call__(
        self, messages: Sequence[Message] | None, *, tools: Sequence[Tool] | None = None, max_tokens: int | None = None
    ) -> Reply:
        self._check_limits(max_tokens)
        conversation = conversation_key(messages, tools)
        place, new = self._place(messages, conversation, tools)
        self._note(new, place.append)

        before = len(self._strand(place.strand).token_ids) + len(place.append)
        asked = time.monotonic()
        answer = await self._sample(place, max_tokens, logprobs=False)

        prompt = self.strands[place.strand].token_ids[:before]
        reply = self._reply(answer, prompt, time.monotonic() - asked, tools)
        after = (*conversation, message_key(reply.message))
        self._said.setdefault(after, []).append(Said(place.strand, before + len(answer.token_ids)))
        return reply

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, logprobs: bool = False
    ) -> Sampled:
        self._check_limits(max_tokens)
        token_ids = [int(token) for token in token_ids]
        if not token_ids:
            raise ValueError("generate needs at least one token")
        place = self._place_tokens(token_ids)
        self._note([], place.append)

        asked = time.monotonic()
        answer = await self._sample(place, max_tokens, logprobs)
        reply = self._reply(answer, token_ids, time.monotonic() - asked)
        log_probabilities = None if answer.logprobs is None else tuple(answer.logprobs)
        return Sampled(tuple(answer.token_ids), answer.finish, log_probabilities, reply.text)

    @property
    def url(self) -> str:
        if self._base_url is None:
            self._base_url = self._open(self)
        return self._base_url

    def count(self, name: str, amount: float = 1.0) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + amount

    def close(self) -> None:
        """End all requests; a later one raises."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def _check_limits(self, max_tokens: int | None) -> None:
        """Raise `EpisodeOver` where the episode has reached a limit."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} is not accepted: give at least 1")
        if self._closed:
            raise RuntimeError("the episode is over: the policy does not speak any more")
        if self._asked >= self._limits.max_turns:
            raise self._over(OutOfTurns(f"environment.max_turns={self._limits.max_turns}"))
        if self._clock.seconds > self._limits.episode_s:
            raise self._over(OutOfTime(f"environment.episode_s={self._limits.episode_s:g}"))

    def _over(self, reason: EpisodeOver) -> EpisodeOver:
        self.ending = reason.ending
        return reason

    def _place(
        self, messages: Sequence[Message] | None, conversation: Conversation, tools: Sequence[Tool] | None
    ) -> tuple[Place, Sequence[Message]]:
        """Return where a conversation continues, and its messages that are new there."""
        if messages is None:
            return Place(len(self.strands), list(self._prompt), 0), [{"role": "user", "content": self._question}]
        if not messages:
            raise ValueError("a conversation has at least one message; None stands for the data set's prompt")

        for known in range(len(conversation) - 1, 1, -1):
            if said := self._said.get(conversation[:known]):
                new = self._without_excess(messages[known - 1 :])
                place = self._after(self._extendable(said), new, tools)
                return place or self._opening(messages, tools), new

        return self._opening(messages, tools), messages

    def _opening(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Place:
        """Return the place of a conversation that continues none, or whose history the template rewrites."""
        return Place(len(self.strands), self.renderer.opening(self._readable(messages), tools), 0)

    def _extendable(self, said: Sequence[Said]) -> Said:
        """Return the latest end of this conversation, if possible one that is the end of its strand."""
        return max(said, key=lambda each: self._is_end(each.strand, each.length))

    def _is_end(self, strand: int, length: int) -> bool:
        return len(self.strands[strand].token_ids) == length and not self.strands[strand].in_flight

    def _after(self, said: Said, new: Sequence[Message], tools: Sequence[Tool] | None) -> Place | None:
        """Return the place after a reply: in its strand, or in a new one where that has gone on."""
        before = self.strands[said.strand].token_ids[: said.length]
        following = self.renderer.following(before, new, tools)
        if following is None:
            return None
        if self._is_end(said.strand, said.length):
            return Place(said.strand, following, len(following))
        return Place(len(self.strands), [*before, *following], len(following))

    def _place_tokens(self, token_ids: list[int]) -> Place:
        """Return the place after the longest idle strand that is a prefix of these tokens."""
        best, length = len(self.strands), 0
        for number, strand in enumerate(self.strands):
            held = len(strand.token_ids)
            if length < held <= len(token_ids) and not strand.in_flight and token_ids[:held] == strand.token_ids:
                best, length = number, held
        return Place(best, token_ids[length:], len(token_ids) - length if length else 0)

    def _without_excess(self, messages: Sequence[Message]) -> list[Message]:
        """Cut observations that have too many tokens."""
        most = self._limits.max_observation_tokens
        cut: list[Message] = []
        for message in messages:
            content = message.get("content")
            if message.get("role") != "assistant" and isinstance(content, str):
                message = {**message, "content": shorten(content, most, self._tokens)}
            cut.append(message)
        return cut

    def _tokens(self, text: str) -> int:
        """Return the tokens of a text, without those around a message."""
        whole, empty = (self.renderer.opening([{"role": "user", "content": content}]) for content in (text, ""))
        return len(whole) - len(empty)

    def _readable(self, messages: Sequence[Message]) -> list[Message]:
        """Cut what follows the first reply; the messages before it are the question."""
        roles = [message.get("role") for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        return [*messages[:first], *self._without_excess(messages[first:])]

    def _strand(self, number: int) -> Strand:
        if number == len(self.strands):
            self.strands.append(Strand())
        return self.strands[number]

    async def _sample(self, place: Place, max_tokens: int | None, logprobs: bool) -> Answer:
        """Have an engine extend a strand.

        Raises:
            OutOfTokens: There was no room for another token.
        """
        self._asked += 1
        self.count("observation_tokens", place.observed)
        strand = self._strand(place.strand)
        strand.in_flight = True
        strand.token_ids += place.append

        limits = [each for each in (max_tokens, self._limits.max_turn_tokens) if each is not None]
        request = self._ask(place.strand, place.append, min(limits, default=None), logprobs)
        task = asyncio.ensure_future(_extend(strand, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        with self._clock.waiting():
            answer = await asyncio.shield(task)
        if answer.finish == "full":
            raise self._over(OutOfTokens("rollout.max_completion_tokens, or the context, is full"))
        return answer

    def _reply(
        self, answer: Answer, before: Sequence[int], seconds: float, tools: Sequence[Tool] | None = None
    ) -> Reply:
        reply = dataclasses.replace(
            self.renderer.parse(answer.token_ids, before, tools),
            truncated=answer.finish == "length",
            token_ids=tuple(answer.token_ids),
            prompt_tokens=len(before),
        )
        self.text = reply.text
        self.truncated = reply.truncated
        self.count("tool_calls", len(reply.tool_calls))
        self.count("tool_failures", sum(not call.ok for call in reply.tool_calls))
        self.turns.append(_turn("assistant", spoken(reply), len(answer.token_ids), seconds))
        return reply

    def _note(self, messages: Sequence[Message], append: Sequence[int]) -> None:
        """Add what the policy reads to `turns`. The tokens and seconds are of all of it: the last message has them."""
        seconds = self._clock.seconds - self._noted_s
        self._noted_s += seconds

        for message in messages[:-1]:
            self.turns.append(_turn(str(message.get("role")), str(message.get("content") or ""), 0, 0.0))
        last = messages[-1] if messages else {"role": "tokens"}
        self.turns.append(_turn(str(last.get("role")), str(last.get("content") or ""), len(append), seconds))


def _turn(role: str, text: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {"role": role, "text": text, "tokens": tokens, "seconds": seconds}


async def _extend(strand: Strand, request: Awaitable[Answer]) -> Answer:
    try:
        answer = await request
        strand.token_ids += answer.token_ids
        return answer
    finally:
        strand.in_flight = False

"""The policy of one episode: conversations become sequences of tokens, which engines extend.

What an environment sends is matched against the conversations so far by their messages (`policy(messages)`) or by
their tokens (`policy.generate`), see `app.environment.worker.sequences`.

An answer extends its sequence even if the caller was cancelled, because the driver trains on it.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from app.environment.protocol import EpisodeOver, Message, OutOfTokens, Renderer, Reply, Sampled, Tools
from app.environment.wire import Answer, Limits
from app.environment.worker.calls import Clock
from app.environment.worker.limits import reached, turn_tokens
from app.environment.worker.sequences import Continuation, EpisodeSequences, OpenSequence, conversation_key
from app.utils.chat_messages import normalized

# sequence, all its tokens, max_tokens, logprobs
AskEngine = Callable[[int, Sequence[int], int | None, bool], Awaitable[Answer]]


class EpisodePolicy:
    """`protocol.Policy` of one episode. `opening`: messages of the data set's prompt, of which `prompt` has the tokens.

    `ask` samples from an engine; `url` opens an endpoint for OpenAI clients and returns its base URL.
    """

    def __init__(
        self,
        ask: AskEngine,
        renderer: Renderer,
        limits: Limits,
        opening: Sequence[Message],
        prompt: Sequence[int],
        clock: Clock,
        url: Callable[["EpisodePolicy"], str],
    ) -> None:
        self.text = ""  # of the last reply
        self.ending: str | None = None  # of the last limit that was reached
        self.truncated = False  # the last reply
        self.turns: list[dict[str, Any]] = []  # for people: role, text, tokens and seconds
        self.metrics = {"tool_calls": 0.0, "tool_failures": 0.0, "observation_tokens": 0.0}
        self._ask = ask
        self._renderer = renderer
        self._limits = limits
        self._opening = opening
        self._prompt = list(prompt)
        self._clock = clock
        self._open = url
        self._base_url: str | None = None
        self._requests_sent = 0
        self._noted_s = 0.0  # the environment's own seconds that are in `turns`
        self._sequences = EpisodeSequences(renderer, limits.max_observation_tokens, opening)
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._closed = False

    async def __call__(
        self, messages: Sequence[Message] | None, *, tools: Tools | None = None, max_tokens: int | None = None
    ) -> Reply:
        self._check_limits(max_tokens)
        messages = None if messages is None else normalized(messages)
        conversation = conversation_key(messages, tools)
        if messages is None:  # as the driver rendered it, without tools
            rendered = None if tools else self._sequences.new(self._prompt)
            continuation = rendered or self._sequences.continuation((), conversation, tools)[0]
            new = self._opening
        elif not messages:
            raise ValueError("a conversation has at least one message; None stands for the data set's prompt")
        else:
            continuation, new = self._sequences.continuation(messages, conversation, tools)
        self._add_messages(new, len(continuation.append))

        _, reply = await self._sample(continuation, max_tokens, tools=tools)
        self._sequences.remember(continuation.sequence, messages or (), conversation, reply)
        return reply

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, logprobs: bool = False
    ) -> Sampled:
        self._check_limits(max_tokens)
        token_ids = [int(token) for token in token_ids]
        if not token_ids:
            raise ValueError("generate needs at least one token")
        continuation = self._sequences.continuation_of_tokens(token_ids)
        rendered = self._renderer.decode(continuation.append)
        self._add_messages([{"role": "user", "content": rendered}] if rendered else [], len(continuation.append))

        answer, reply = await self._sample(continuation, max_tokens, logprobs=logprobs)
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
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} is not accepted: give at least 1")
        if self._closed:
            raise RuntimeError("the episode is over: the policy is not sampled again")
        if (over := reached(self._limits, self._requests_sent, self._clock.seconds)) is not None:
            raise self._over(over)

    def _over(self, reason: EpisodeOver) -> EpisodeOver:
        self.ending = reason.ending
        return reason

    async def _sample(
        self, continuation: Continuation, max_tokens: int | None, *, logprobs: bool = False, tools: Tools | None = None
    ) -> tuple[Answer, Reply]:
        """Append tokens, sample from an engine after them, and parse that. Raises `OutOfTokens` without room for it."""
        started = time.monotonic()
        sequence = self._sequences.extend(continuation)
        before = list(sequence.token_ids)
        self._requests_sent += 1
        self.count("observation_tokens", continuation.observed)

        most = turn_tokens(self._limits, max_tokens)
        request = self._ask(continuation.sequence, before, most, logprobs)
        task = asyncio.ensure_future(_extend(sequence, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        with self._clock.waiting():
            answer = await asyncio.shield(task)
        if answer.finish == "full":
            raise self._over(OutOfTokens("rollout.max_completion_tokens, or the context, is full"))

        seconds = time.monotonic() - started
        reply = dataclasses.replace(
            self._renderer.parse(answer.token_ids, before, tools),
            truncated=answer.finish == "length",
            token_ids=tuple(answer.token_ids),
            prompt_tokens=len(before),
        )
        self.text = reply.text
        self.truncated = reply.truncated
        self.count("tool_calls", len(reply.tool_calls))
        self.count("tool_failures", sum(not call.ok for call in reply.tool_calls))
        self._add_turn("assistant", readable(reply), len(reply.token_ids), seconds)
        return answer, reply

    def _add_messages(self, messages: Sequence[Message], tokens: int) -> None:
        """Add what the policy reads. The tokens and seconds are of all of it: the last message has them."""
        for message in messages:
            self._add_turn(str(message.get("role")), str(message.get("content") or ""), 0, 0.0)
        if messages:
            seconds = self._clock.seconds - self._noted_s
            self._noted_s += seconds
            self.turns[-1] |= {"tokens": tokens, "seconds": seconds}

    def _add_turn(self, role: str, text: str, tokens: int, seconds: float) -> None:
        self.turns.append({"role": role, "text": text, "tokens": tokens, "seconds": seconds})


async def _extend(sequence: OpenSequence, request: Awaitable[Answer]) -> Answer:
    try:
        answer = await request
        sequence.token_ids += answer.token_ids
        return answer
    finally:
        sequence.in_flight = False


def readable(reply: Reply) -> str:
    """Return the readable text of a reply."""
    parts = [f"<think>{reply.reasoning}</think>"] if reply.reasoning else []
    parts += [reply.text] if reply.text else []
    for call in reply.tool_calls:
        problem = "" if call.ok else f" [{call.status}]"
        parts.append(f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False, default=str)}){problem}")
    return "\n".join(parts)

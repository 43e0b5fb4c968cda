"""The sequences of one episode, and where the next tokens of a conversation go.

A sequence is a list of tokens that only grows: what was appended, what was sampled, what was appended next. A
conversation is matched against those so far by its messages or by its tokens, so a reply is never tokenized again.

    sequence 0   question │ reply a │ observation │ reply b            ← policy([question, a, observation])
    sequence 1   question │ reply a │ another observation │ reply c    ← policy([question, a, another observation])

Invariants:
- Every sampled token is in exactly one sequence as sampled. A sequence that forks off another begins with its tokens as
  context.
- A sequence with a request in flight is not extended by another request.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.environment.protocol import Message, Renderer, Reply, Tools
from app.environment.worker.limits import shorten

Conversation = tuple[str, ...]  # the key of its tools, then of each message


@dataclass(eq=False, slots=True)
class OpenSequence:
    """One sequence of tokens."""

    token_ids: list[int] = field(default_factory=list)
    in_flight: bool = False


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """The position of a reply's end in its sequence."""

    sequence: int
    length: int  # tokens of the sequence, the reply included
    reasonings: tuple[str, ...]  # of the conversation's replies; of this one last


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens to append, and the sequence that they extend."""

    sequence: int  # the number of sequences so far: a new one
    append: list[int]
    observed: int  # tokens of `append` that are neither an opening nor another sequence's


class EpisodeSequences:
    """The sequences of one episode. `prompt`: messages of the data set's prompt, used for `messages=None`."""

    def __init__(self, renderer: Renderer, max_observation_tokens: int, prompt: Sequence[Message]) -> None:
        self.all: list[OpenSequence] = []  # by number
        self._renderer = renderer
        self._max_observation_tokens = max_observation_tokens
        self._prompt = prompt
        self._reply_ends: dict[Conversation, list[ReplyEnd]] = {}

    def continuation(
        self, messages: Sequence[Message], conversation: Conversation, tools: Tools | None
    ) -> tuple[Continuation, Sequence[Message]]:
        """Return the sequence that a conversation continues, and the messages to append to it.

        `messages` is the whole conversation; if that began with None, the messages after the prompt, possibly none.
        """
        for known in range(len(conversation) - 1, 1, -1):
            if ends := self._reply_ends.get(conversation[:known]):
                new = self._without_excess(messages[known - 1 :])
                continuation = self._after(self._extendable(ends, messages[: known - 1]), new, tools)
                return continuation or self._opening(messages, conversation, tools), new

        return self._opening(messages, conversation, tools), messages

    def continuation_of_tokens(self, token_ids: list[int]) -> Continuation:
        """Return the continuation after the longest idle sequence that is a prefix of these tokens."""
        best, length = len(self.all), 0
        for number, sequence in enumerate(self.all):
            size = len(sequence.token_ids)
            if length < size <= len(token_ids) and not sequence.in_flight and token_ids[:size] == sequence.token_ids:
                best, length = number, size
        return Continuation(best, token_ids[length:], len(token_ids) - length if length else 0)

    def new(self, token_ids: Sequence[int]) -> Continuation:
        return Continuation(len(self.all), list(token_ids), 0)

    def extend(self, continuation: Continuation) -> OpenSequence:
        """Append tokens and start a request."""
        if continuation.sequence == len(self.all):
            self.all.append(OpenSequence())
        sequence = self.all[continuation.sequence]
        sequence.in_flight = True
        sequence.token_ids += continuation.append
        return sequence

    def remember(self, sequence: int, messages: Sequence[Message], conversation: Conversation, reply: Reply) -> None:
        """Remember where the reply to a conversation ends, for one that goes on after it."""
        length = reply.prompt_tokens + len(reply.token_ids)
        end = ReplyEnd(sequence, length, (*reasonings(messages), reply.reasoning))
        self._reply_ends.setdefault((*conversation, message_key(reply.message)), []).append(end)

    def _opening(self, messages: Sequence[Message], conversation: Conversation, tools: Tools | None) -> Continuation:
        """Return the continuation of a conversation that continues none, or whose history the template rewrites."""
        # the data set's prompt stands before no messages, and before a reply to it, whatever the tools
        first = conversation[1:2]
        began_with_none = not first or any(known[1:] == first for known in self._reply_ends)
        whole = [*self._prompt, *messages] if began_with_none else messages
        return self.new(self._renderer.opening(self._readable(whole), tools))

    def _extendable(self, ends: Sequence[ReplyEnd], messages: Sequence[Message]) -> ReplyEnd:
        """Return the end of this conversation with the same reasoning: of the last reply, then of those before it.

        Of several, one that is the end of its sequence; of these, the latest.
        """
        wanted = reasonings(messages)

        def similarity(each: ReplyEnd) -> tuple[list[bool], bool]:
            same = [mine == its for mine, its in zip(reversed(wanted), reversed(each.reasonings), strict=True)]
            return same, self._is_end(each.sequence, each.length)

        return max(reversed(ends), key=similarity)

    def _is_end(self, sequence: int, length: int) -> bool:
        return len(self.all[sequence].token_ids) == length and not self.all[sequence].in_flight

    def _after(self, end: ReplyEnd, new: Sequence[Message], tools: Tools | None) -> Continuation | None:
        """Return the continuation after a reply: in its sequence, or in a new one where that has gone on."""
        before = self.all[end.sequence].token_ids[: end.length]
        following = self._renderer.following(before, new, tools)
        if following is None:
            return None
        if self._is_end(end.sequence, end.length):
            return Continuation(end.sequence, following, len(following))
        return Continuation(len(self.all), [*before, *following], len(following))

    def _without_excess(self, messages: Sequence[Message]) -> list[Message]:
        cut: list[Message] = []
        for message in messages:
            content = message.get("content")
            if message.get("role") != "assistant" and isinstance(content, str):
                message = {**message, "content": shorten(content, self._max_observation_tokens, self._tokens)}
            cut.append(message)
        return cut

    def _tokens(self, text: str) -> int:
        """Return the tokens of a text, without those around a message."""
        whole, empty = (self._renderer.opening([{"role": "user", "content": content}]) for content in (text, ""))
        return len(whole) - len(empty)

    def _readable(self, messages: Sequence[Message]) -> list[Message]:
        """Shorten long observations after the first reply; the messages before it are the question, and stay whole."""
        roles = [message.get("role") for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        return [*messages[:first], *self._without_excess(messages[first:])]


def conversation_key(messages: Sequence[Message] | None, tools: Tools | None) -> Conversation:
    """Return a key of normalized messages, equal for equivalent ones; a prefix of it is the key of their start."""
    return (_json(list(tools or ())), *map(message_key, messages or ()))


def reasonings(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the reasoning of each reply in a conversation, "" for one without."""
    return tuple(str(each.get("reasoning_content") or "") for each in messages if each.get("role") == "assistant")


def message_key(message: Message) -> str:
    """Return a key of a normalized message. Clients drop the reasoning of replies, and give calls other ids."""
    if message["role"] != "assistant":
        return _json(message)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _json(["assistant", message["content"], [[call["name"], call["arguments"]] for call in calls]])


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)

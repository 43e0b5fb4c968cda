"""A policy that says what a test scripted, over characters as tokens, with sequences as a worker keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.environment.protocol import Message, OutOfTurns, Reply, Sampled, Tool


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


@dataclass
class ScriptedPolicy:
    """Invariant: a sequence only grows, by the tokens of new messages and by what was sampled after them."""

    script: Sequence[Reply | Exception | str]  # a string: what `generate` samples, or a reply of this text
    sequences: list[list[int]] = field(default_factory=list)
    sampled: list[tuple[int, int, int]] = field(default_factory=list)  # sequence, begin and end of each turn
    asked: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    url: str = ""
    _talks: list[list[Message]] = field(default_factory=list)  # by sequence

    async def __call__(
        self,
        messages: Sequence[Message] | None,
        *,
        tools: Sequence[Tool] | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        messages = list(messages or ())
        self.asked.append({"messages": messages, "tools": tools, "max_tokens": max_tokens})
        entry = self._next()
        reply = Reply(entry) if isinstance(entry, str) else entry

        sequence = self._sequence_of(messages)
        new = messages[len(self._talks[sequence]) :]
        self.sequences[sequence] += encode("".join(f"<{message['role']}>{message['content']}" for message in new))
        before = len(self.sequences[sequence])
        reply = replace(reply, token_ids=tuple(encode(f"<assistant>{reply.text}")), prompt_tokens=before)
        self._sample(sequence, reply.token_ids)
        self._talks[sequence] = [*messages, reply.message]
        return reply

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, logprobs: bool = False
    ) -> Sampled:
        self.asked.append({"token_ids": list(token_ids), "max_tokens": max_tokens})
        entry = self._next()
        assert isinstance(entry, str)
        fits = [k for k, sequence in enumerate(self.sequences) if sequence == list(token_ids[: len(sequence)])]
        sequence = max(fits, key=lambda k: len(self.sequences[k]), default=len(self.sequences))
        if sequence == len(self.sequences):
            self.sequences.append([])
        self.sequences[sequence] = list(token_ids)
        said = tuple(self.tokens_of(entry))
        self._sample(sequence, said)
        return Sampled(said, "stop", tuple(-0.5 - index / 8 for index in range(len(said))) if logprobs else None)

    def tokens_of(self, text: str) -> list[int]:
        return encode(text)

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + amount

    def _next(self) -> Reply | str:
        turn = len(self.asked) - 1
        if turn >= len(self.script):
            raise OutOfTurns
        entry = self.script[turn]
        if isinstance(entry, Exception):
            raise entry
        return entry

    def _sequence_of(self, messages: Sequence[Message]) -> int:
        for sequence, talk in enumerate(self._talks):
            if talk and list(messages[: len(talk)]) == talk:
                return sequence
        self.sequences.append([])
        self._talks.append([])
        return len(self.sequences) - 1

    def _sample(self, sequence: int, token_ids: Sequence[int]) -> None:
        begin = len(self.sequences[sequence])
        self.sequences[sequence] += token_ids
        self.sampled.append((sequence, begin, len(self.sequences[sequence])))

    def said(self) -> list[str]:
        return [decode(self.sequences[sequence][begin:end]) for sequence, begin, end in self.sampled]

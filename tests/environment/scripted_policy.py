"""A policy that says what a test scripted, over characters as tokens, and records what it was asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.environment.protocol import Message, OutOfTurns, Reply, Sampled, Tool
from tests.environment.characters import tokens


@dataclass
class ScriptedPolicy:
    """Says one entry after the other; then `OutOfTurns` is raised."""

    script: Sequence[Reply | Exception | str]  # a string: what `generate` samples, or a reply of this text
    asked: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    url: str = ""

    async def __call__(
        self, messages: Sequence[Message] | None, *, tools: Sequence[Tool] | None = None, max_tokens: int | None = None
    ) -> Reply:
        self.asked.append({"messages": list(messages or ()), "tools": tools, "max_tokens": max_tokens})
        entry = self._next()
        return Reply(entry) if isinstance(entry, str) else entry

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, logprobs: bool = False
    ) -> Sampled:
        self.asked.append({"token_ids": list(token_ids), "max_tokens": max_tokens})
        entry = self._next()
        assert isinstance(entry, str)
        said = tuple(tokens(entry))
        return Sampled(said, "stop", tuple(-0.5 - index / 8 for index in range(len(said))) if logprobs else None)

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + amount

    def _next(self) -> Reply | str:
        turn = len(self.asked) - 1
        entry = self.script[turn] if turn < len(self.script) else OutOfTurns()
        if isinstance(entry, Exception):
            raise entry
        return entry

"""What users of `environment=` see: the task, the policy's replies, and the two ends of an episode.

Standard library only: a worker process imports this module in any interpreter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]  # {"role": "user" | "assistant" | "system" | "tool", "content": str, …}


class EpisodeOver(Exception):
    """The policy cannot speak again in this episode."""


class OutOfTokens(EpisodeOver):
    """No token is left for a further reply."""


class OutOfTurns(EpisodeOver):
    """The episode has used its `max_turns`."""


class OutOfTime(EpisodeOver):
    """The episode has used its `episode_s`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data, as an episode gets it."""

    id: str
    question: str
    answer: str
    source: str
    row: Mapping[str, Any]
    seed: int  # the same for all members of a group
    training: bool  # False in an evaluation


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a reply. `status` is "ok" or the parser's problem in words ("the call was not closed")."""

    name: str
    arguments: Mapping[str, Any]
    status: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply of the policy. `text` is what was said, without reasoning and tool calls."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    truncated: bool  # ended by the token limit
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens and, if asked for, their log-probabilities: [N] each."""

    token_ids: tuple[int, ...]
    finish: str  # stop or length
    logprobs: tuple[float, ...] | None = None


class Policy(Protocol):
    """The policy as an episode meets it."""

    url: str  # OpenAI-compatible base URL of this episode

    async def __call__(
        self,
        messages: Sequence[Message] | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Reply: ...

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, logprobs: bool = False
    ) -> Sampled: ...


class Environment(Protocol):
    """An environment that drives itself. `close()` is optional."""

    async def run(self, task: Task, policy: Policy) -> float | Mapping[str, float] | None: ...

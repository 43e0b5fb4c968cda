"""The interface of an environment: the task, the policy, its replies.

An environment is an object with `run`, or one with `begin` and `step` (`app/environment/own.py`). A new one is made for
every episode. `run` returns a score, several by name (the first is the score), or None. Optional: `score()`, where a
limit ends `run` early, and `close()`, each plain or async; `metrics`, numbers by name; `limits_itself = True`, if `run`
limits its own steps and may take longer than `environment.timeout_s`; `stuck`, whether its code runs on at the end.

    class Solver:
        async def run(self, task, policy):
            draft = await policy([{"role": "user", "content": task.question}])
            review = await policy([{"role": "user", "content": "Check: " + draft.text}])
            return float(review.text.strip() == task.answer)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]  # {"role": "system"|"user"|"assistant"|"tool", "content": str, …}
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Tools = Sequence[Tool]


class EnvironmentFailed(Exception):
    """An episode has no score, through no fault of the policy."""


class EpisodeOver(Exception):
    """The episode hit a limit; the policy will not be sampled again. Raised by a call of the policy.

    Where it leaves `run`, the episode ends with this `ending`, and with the score of the environment's `score()`, or 0.
    """

    ending = "stop"


class OutOfTokens(EpisodeOver):
    """No room for another token is left in `rollout.max_completion_tokens` or in the context."""

    ending = "length"


class OutOfTurns(EpisodeOver):
    """The policy has replied `environment.max_turns` times."""

    ending = "turns"


class OutOfTime(EpisodeOver):
    """The environment has used its `environment.episode_s`."""

    ending = "time"


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data set."""

    id: str  # of the prompt, "<source>/<row>@<epoch>"
    question: str  # of messages, the last one's text
    answer: str
    source: str  # name of the data set
    row: Mapping[str, Any] = field(default_factory=dict)  # every column of the row, as JSON values
    seed: int = 0  # the same for all members of a group
    training: bool = True  # False in an evaluation
    messages: Sequence[Message] = ()  # of a prompt that is a conversation: all of it, which policy(None) opens with


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy made, as far as it could be read."""

    name: str
    arguments: Mapping[str, Any]
    status: str  # "ok", or what is wrong with it in words: "the call was not closed"
    id: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's reply of one turn."""

    text: str  # without reasoning and tool calls
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    truncated: bool = False  # ended by the token limit
    token_ids: tuple[int, ...] = ()  # as sampled
    prompt_tokens: int = 0  # that the policy read before it, this time and earlier

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, for the conversation of the next call."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one turn, for adapters that render on their own."""

    token_ids: tuple[int, ...]
    finish: str  # "stop" or "length"
    logprobs: tuple[float, ...] | None = None  # of the engine, one for each token, if requested
    text: str = ""  # parsed, without reasoning and tool calls


class Policy(Protocol):
    """The model that is trained, within one episode."""

    async def __call__(
        self, messages: Sequence[Message] | None, *, tools: Sequence[Tool] | None = None, max_tokens: int | None = None
    ) -> Reply:
        """Return the policy's reply to a conversation.

        If the conversation extends an earlier one of this episode (the same messages, the replies as they were given:
        `reply.message`), only the tokens of the new messages are appended to the policy's reply, token for token.
        Else, or where the chat template rewrites the history, a new sequence begins.

        Args:
            messages: The whole conversation. None: the prompt of the data set, as `data.template` renders it; the
                conversation then continues with `[reply.message, …]`, and the prompt stands before it in any rendering.
            tools: Schemas of the tools that the policy may call.
            max_tokens: Of this reply; at most `environment.max_turn_tokens`.

        Raises:
            EpisodeOver: A limit of the episode was reached, and nothing was sampled.
        """

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, logprobs: bool = False
    ) -> Sampled:
        """Sample after these tokens. The longest sequence that is a prefix of them is extended.

        Raises:
            EpisodeOver: As above.
        """

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients, `http://127.0.0.1:<port>/<episode>/v1`. The first use starts the server."""

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a metric of the episode, such as `tool_failures`. Logged as `environment/<name>`."""


class Renderer(Protocol):
    """Messages as the tokens of a chat template, or of plain text, and replies as text."""

    @property
    def tool_syntax(self) -> str | None:
        """Name of the syntax of tool calls; None where there are no tools."""

    def opening(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the tokens of a conversation, up to the policy's reply.

        Raises:
            ValueError: The template has no place for such messages or tools.
        """

    def following(
        self, token_ids: Sequence[int], messages: Sequence[Message], tools: Tools | None = None
    ) -> list[int] | None:
        """Return the tokens to append to a sequence so that `messages` follow and the policy replies next.

        Args:
            token_ids: [L] The sequence; it ends with a reply, whose last token may or may not be a stop token. A reply
                without one is closed here.
            messages: The new messages alone.
            tools: The tools that the sequence was opened with.

        Returns:
            None if the template would rewrite the sequence: an assistant message among the new ones, or earlier
            reasoning that a new user message strips.
        """

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Tools | None = None) -> Reply:
        """Parse a reply; never fails on what was sampled. The caller sets `truncated`.

        Args:
            token_ids: [N] The sampled tokens.
            prompt_ids: [L] The sequence before them: it may have opened the reasoning.
            tools: The declared tools: their schemas say which XML arguments are strings.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens [N] that a client rendered itself."""

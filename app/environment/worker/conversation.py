"""Conversations: the messages that open one, keys to find equal ones, and the turns of an episode as text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.environment.protocol import Message, Reply, Task, Tool
from app.environment.worker.calls import Clock

Conversation = tuple[str, ...]  # of the tools, then of each message


def conversation_key(messages: Sequence[Message] | None, tools: Sequence[Tool] | None) -> Conversation:
    """Return texts that are equal for conversations that say the same; the prefix of one is the key of its beginning.

    Args:
        messages: In the form of `normalized`.
    """
    return (_json(list(tools or ())), *map(message_key, messages or ()))


def reasonings(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the reasoning of each reply in a conversation, "" for one without."""
    return tuple(str(each.get("reasoning_content") or "") for each in messages if each.get("role") == "assistant")


def readable(reply: Reply) -> str:
    """Return the readable text of a reply."""
    parts = [f"<think>{reply.reasoning}</think>"] if reply.reasoning else []
    parts += [reply.text] if reply.text else []
    for call in reply.tool_calls:
        problem = "" if call.ok else f" [{call.status}]"
        parts.append(f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False, default=str)}){problem}")
    return "\n".join(parts)


def message_key(message: Message) -> str:
    """Return a text that is equal for messages that say the same.

    Clients drop the reasoning of earlier replies, and give calls other ids.

    Args:
        message: In the form of `normalized`.
    """
    if message["role"] != "assistant":
        return _json(message)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _json(["assistant", message["content"], [[call["name"], call["arguments"]] for call in calls]])


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


class Transcript:
    """The turns of one episode.

    Args:
        clock: Measures the environment's own time.

    Attributes:
        turns: role, text, tokens and seconds, in order.
    """

    def __init__(self, clock: Clock) -> None:
        self.turns: list[dict[str, Any]] = []
        self._clock = clock
        self._noted_s = 0.0  # the environment's own seconds that are in `turns`

    def add_messages(self, messages: Sequence[Message], tokens: int) -> None:
        """Add what the policy reads. The tokens and seconds are of all of it: the last message has them."""
        if not messages:
            return
        seconds = self._clock.seconds - self._noted_s
        self._noted_s += seconds

        for message in messages[:-1]:
            self._add(str(message.get("role")), str(message.get("content") or ""), 0, 0.0)
        last = messages[-1]
        self._add(str(last.get("role")), str(last.get("content") or ""), tokens, seconds)

    def add_reply(self, reply: Reply, seconds: float) -> None:
        """Add what the policy replied. `seconds`: of the engine."""
        self._add("assistant", readable(reply), len(reply.token_ids), seconds)

    def _add(self, role: str, text: str, tokens: int, seconds: float) -> None:
        self.turns.append({"role": role, "text": text, "tokens": tokens, "seconds": seconds})


@dataclass(frozen=True, slots=True)
class Framing:
    """What the data puts around a question."""

    system: str | None
    prefix: str
    suffix: str

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Framing":
        """Return the framing that a worker's settings name as `system`, `prefix` and `suffix`."""
        return cls(settings.get("system"), settings.get("prefix", ""), settings.get("suffix", ""))

    def messages(self, task: Task) -> list[Message]:
        """Return the conversation that an episode opens with. The driver has framed one that is of the data."""
        if task.messages:
            return list(task.messages)
        user = {"role": "user", "content": self.prefix + task.question + self.suffix}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]

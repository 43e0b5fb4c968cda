"""Messages as keys, to find equal conversations, and as readable text."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.environment.protocol import Message, Reply, Tool

Conversation = tuple[str, ...]  # of the tools, then of each message


def conversation_key(messages: Sequence[Message] | None, tools: Sequence[Tool] | None) -> Conversation:
    """Return texts that are equal for conversations that say the same; the prefix of one is the key of its beginning.

    Raises:
        TypeError: Something is not a message.
    """
    return (_json(list(tools or ())), *map(message_key, messages or ()))


def reasonings(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the reasoning of each reply in a conversation, "" for one without."""
    return tuple(str(each.get("reasoning_content") or "") for each in messages if each.get("role") == "assistant")


def spoken(reply: Reply) -> str:
    """Return the readable text of a reply."""
    parts = [f"<think>{reply.reasoning}</think>"] if reply.reasoning else []
    parts += [reply.text] if reply.text else []
    for call in reply.tool_calls:
        problem = "" if call.ok else f" [{call.status}]"
        parts.append(f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False, default=str)}){problem}")
    return "\n".join(parts)


def message_key(message: Message) -> str:
    """Return a text that is equal for messages that say the same.

    Clients drop the reasoning of earlier replies, and write arguments of tool calls as text or as objects.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"{message!r:.80} is not a message: give a mapping with role and content")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    if message["role"] == "assistant":
        return _json(["assistant", content or "", [_call_key(call) for call in message.get("tool_calls") or ()]])
    return _json({**message, "content": content or ""})


def _call_key(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # the policy's own bad JSON stays text
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)

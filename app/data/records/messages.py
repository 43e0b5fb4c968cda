"""A column of chat messages as a prompt: `[{"role": "user", "content": "1+1="}, …]`.

Invariants:
- Messages are taken whole or refused: no message and no role is left out.
- The last message of a prompt is a user's or a tool's, so that the policy replies to it. A demonstration ends with the
  reply to imitate, an assistant's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
LAST = ("user", "tool")
REPLY = "assistant"
FRAMES = ("system", "developer")  # roles that data.system would stand beside


class WrongMessages(ValueError):
    """A column does not hold messages that can be a prompt. The text follows "give ", without a place."""


def is_list_of_messages(value: Any) -> bool:
    """Whether a value is meant as messages: a list, whose entries have a role."""
    return isinstance(value, Sequence) and not isinstance(value, str) and any(map(_has_role, value))


def checked(value: Sequence[Any], *, replied: bool = False) -> tuple[Message, ...]:
    """Return the messages of a column, without fields that are null, and with their parts of text joined.

    With `replied`, the last one is the reply to those before it.

    >>> checked([{"role": "user", "content": [{"type": "text", "text": "1+1="}], "name": None}])
    ({'role': 'user', 'content': '1+1='},)

    Raises:
        WrongMessages: A message has another form or role, or the last one is of a role that cannot be the last.
    """
    messages = []
    for number, message in enumerate(value, start=1):
        if not _has_role(message) or message["role"] not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else type(message).__name__
            raise WrongMessages(f"messages of the roles {', '.join(ROLES)}; message {number} is of {role}")
        fields = {name: each for name, each in message.items() if each is not None}
        messages.append({**fields, "content": _text(fields, number)})

    last = messages[-1]["role"]
    if replied and (last != REPLY or len(messages) < 2 or messages[-2]["role"] not in LAST):
        raise WrongMessages(f"messages that end with a reply of the role {REPLY}; the last one is of the role {last}")
    if not replied and last not in LAST:
        raise WrongMessages(f"messages of which a user's or a tool's is the last; the last one is of the role {last}")
    return tuple(messages)


def framed(messages: Sequence[Message], system: str | None, prefix: str, suffix: str) -> tuple[Message, ...]:
    """Return messages with what the data puts around them: a first system message, and text around the last user's.

    Raises:
        WrongMessages: They have a system message of their own.
    """
    found = list(messages)
    users = [index for index, message in enumerate(found) if message["role"] == "user"]
    if users:
        last = found[users[-1]]
        found[users[-1]] = {**last, "content": f"{prefix}{last['content']}{suffix}"}

    if system is None:
        return tuple(found)
    if any(message["role"] in FRAMES for message in found):
        raise WrongMessages("null where messages have a system message of their own")
    return ({"role": "system", "content": system}, *found)


def _has_role(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _text(message: Message, number: int) -> str:
    """Return the text of a message; an assistant that only calls tools says none."""
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        other = next((part.get("type") for part in content if part.get("type") != "text"), None)
        if other is None:
            return "".join(str(part.get("text") or "") for part in content)
        raise WrongMessages(f"messages of text; message {number} has a part of type {other}")
    raise WrongMessages(f"messages whose content is text; that of message {number} is {type(content).__name__}")

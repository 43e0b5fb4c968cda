"""A column of chat messages as a prompt: `[{"role": "user", "content": "1+1="}, …]`.

Invariants:
- Messages are taken whole or refused: no message and no role is left out.
- The last message of a prompt is a user's or a tool's, so that the policy replies to it. A demonstration ends with the
  reply to imitate, an assistant's.
"""

from collections.abc import Sequence

from app.utils.chat_messages import REPLY, Message, WrongMessages, messages_in, normalized

__all__ = ["REPLY", "Message", "WrongMessages", "checked", "framed", "messages_in", "normalized"]

LAST = ("user", "tool")
FRAMES = ("system", "developer")  # roles that data.system would stand beside


def checked(messages: Sequence[Message], *, replied: bool = False) -> None:
    """Check that normalized messages can be a prompt or, with `replied`, a prompt and the reply to it.

    Raises:
        WrongMessages: The last one is of a role that cannot be the last, or no reply is to be imitated.
    """
    last = messages[-1]["role"]
    if not replied and last not in LAST:
        raise WrongMessages(f"messages of which a user's or a tool's is the last; the last one is of the role {last}")
    if replied and last != REPLY:
        raise WrongMessages(f"messages that end with a reply of the role {REPLY}; the last one is of the role {last}")
    if replied and (len(messages) < 2 or messages[-2]["role"] not in LAST):
        before = f"one of the role {messages[-2]['role']}" if len(messages) > 1 else "nothing"
        raise WrongMessages(f"messages whose last reply follows a user's or a tool's message; it follows {before}")
    if replied and not any(message.get("train", message["role"] == REPLY) for message in messages[1:]):
        raise WrongMessages("messages of which a reply is trained on; none is")


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

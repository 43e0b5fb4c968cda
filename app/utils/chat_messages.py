"""Chat messages in one form, whether rows of data, an environment or a client of OpenAI's wrote them.

    role                 one of ROLES, and OpenAI's older `function`, which is `tool`; ShareGPT's `from` and `value` are
                         read as role and content
    content              text; parts of text are joined
    reasoning_content    also from `reasoning` and `thinking`
    tool_calls           [{"type": "function", "function": {"name": …, "arguments": {…}}}]; JSON text is parsed
                         also from `function_call`, OpenAI's older field of one function
    train                false: a demonstration does not imitate this reply; from any name in FLAGS

Other fields stay as they are: a chat template may read them. Imports the standard library only.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
REPLY = "assistant"
SHAREGPT = {  # `from` → role
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), REPLY),
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
}
FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "train")  # which are read
REASONING = ("reasoning_content", "reasoning", "thinking")  # vLLM and Qwen; OpenAI and Gemma; transformers and gpt-oss
FLAGS = ("train", "weight", "loss_mask", "loss", "train_on_turn", "trainable")
TEXT_PARTS = ("text", "input_text", "output_text", None)
OPEN, CLOSE = "<think>", "</think>"
SURE = 8  # characters: a shorter text may be found in a prompt by chance
CHANGE = "changed"
MARK = "\U0010fffd"  # of a private plane

Encode = Callable[[str], list[int]]  # without special tokens around the text


class WrongMessages(ValueError):
    """A value does not hold chat messages. The text follows "give ", without a place."""


def messages_in(value: Any) -> Sequence[Any] | None:
    """Return the list of messages that a value is meant as, which may be their JSON text; else None.

    >>> messages_in('[{"from": "human", "value": "1+1="}]')
    [{'from': 'human', 'value': '1+1='}]
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = of_json(value)
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return value if is_list and any(map(_has_role, value)) else None


def normalized(
    messages: Sequence[Any], *, padded: bool = False, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[Message, ...]:
    """Return messages in the form above, without fields that are null.

    Args:
        padded: The values are Arrow's, whose structs have the keys of all rows: those of other rows are null. Nulls
            inside calls are then left out too, but for arguments that the schema of the called tool requires.
        tools: Schemas of the tools.

    >>> normalized([{"role": "user", "content": [{"type": "text", "text": "1+1="}], "name": None}])
    ({'role': 'user', 'content': '1+1='},)

    Raises:
        WrongMessages: A message has another form or role.
    """
    required = None
    if padded:
        functions = [tool.get("function") or tool for tool in tools]
        required = {str(each.get("name")): (each.get("parameters") or {}).get("required") or () for each in functions}
    return tuple(_normalized(message, number, required) for number, message in enumerate(messages, start=1))


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Return normalized messages as chat templates read them: the reasoning under each of its names."""
    return [
        {**message, **dict.fromkeys(REASONING, message[REASONING[0]])} if message.get(REASONING[0]) else message
        for message in messages
    ]


def lost(
    messages: Sequence[Message], number: int, text: str, render: Callable[[Sequence[Message]], str], *, thoughts: bool
) -> str | None:
    """Return what a chat template leaves out of a message: its text, a call, its reasoning; None if nothing.

    A template may write another text than that of the message, such as JSON, so it is rendered again with a part
    changed, unless the part is found as it is.

    Args:
        number: Of the message, from 0.
        text: The messages, as `render` renders them.
        thoughts: Whether the reasoning counts.
    """
    for part, written, changed in _changed(messages[number], thoughts):
        if len(written) >= SURE and written in text:
            continue
        if render([*messages[:number], changed, *messages[number + 1 :]]) == text:
            return part
    return None


def _changed(message: Message, thoughts: bool) -> Iterator[tuple[str, str, Message]]:
    """Yield the parts of a message: name, text where it may be found as it is, and the message with another one."""
    content, reasoning, calls = message["content"], message.get(REASONING[0]), message.get("tool_calls", ())
    begin, close, says = content.rpartition(CLOSE) if message["role"] == REPLY else ("", "", content)
    if says.strip():
        yield "text", says.strip(), {**message, "content": f"{begin}{close}{says.rstrip()}{CHANGE}"}
    for index, call in enumerate(calls):
        other = {**call, "function": {**call["function"], "name": call["function"]["name"] + CHANGE}}
        yield "tool call", "", {**message, "tool_calls": [*calls[:index], other, *calls[index + 1 :]]}
    if thoughts and reasoning:
        yield "reasoning", reasoning.strip(), {**message, REASONING[0]: reasoning.rstrip() + CHANGE}
    if thoughts and begin.replace(OPEN, "").strip():
        found = begin.rpartition(OPEN)[2].strip()
        yield "reasoning", found, {**message, "content": f"{begin.rstrip()}{CHANGE}\n{close}{says}"}


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The special tokens of a tokenizer that appear in a text as plain characters.

    `MARK` in the middle of such a token keeps it apart while a chat template is rendered. The text before the mark and
    the text after it are then encoded on their own, so that neither has the token.
    """

    kept: re.Pattern[str]  # can stay text
    others: re.Pattern[str]  # cannot: the tokenizer puts a space before each text that it encodes

    @classmethod
    def of(cls, added: Mapping[int, Any], encode: Encode, decode: Callable[[list[int]], str]) -> "ControlTokens":
        """Return those of a tokenizer with these tokens of its own, by id."""
        special = {index: str(token.content) for index, token in added.items() if token.special}

        def stays(token: str) -> bool:
            ids = [*encode(token[:1]), *encode(token[1:])]
            return special.keys().isdisjoint(ids) and decode(ids) == token

        kept = {token for token in special.values() if stays(token)}
        return cls(_any_of(kept), _any_of({*special.values()} - kept))

    def marked(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages with marks in the text of all but replies, which may have tokens of the model's own."""

        def text(message: Message) -> str:
            return self.kept.sub(lambda found: f"{found[0][0]}{MARK}{found[0][1:]}", message["content"])

        return tuple(
            {**each, "content": text(each)} if each["role"] != REPLY and self.kept.search(each["content"]) else each
            for each in messages
        )


def encode_marked(text: str, encode: Encode) -> list[int]:
    """Return the tokens of a text with marks: [L]."""
    return [token for piece in text.split(MARK) for token in encode(piece)]


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def without_nulls(value: Any) -> Any:
    """Return JSON values without the keys that are null, at any depth. Items of lists stay."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def of_json(value: Any) -> Any:
    """Return the value of a JSON text; any other value, or text, stays as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _normalized(message: Any, number: int, required: Mapping[str, Sequence[str]] | None) -> Message:
    if not _has_role(message):
        kind = message.get("role") if isinstance(message, Mapping) else type(message).__name__
        raise WrongMessages(f"messages with role and content; message {number} is of {kind}")

    fields = {
        name: value if required is None or name in ("tool_calls", "function_call") else without_nulls(value)
        for name, value in message.items()
        if value is not None
    }
    if not isinstance(fields.get("role"), str):
        fields = _of_sharegpt(fields, number)
    fields["role"] = "tool" if fields["role"] == "function" else fields["role"]
    if fields["role"] not in ROLES:
        raise WrongMessages(f"messages of the roles {', '.join(ROLES)}; message {number} is of {fields['role']}")

    flags = {name: fields.pop(name) for name in FLAGS if name in fields}
    reasoning = [fields.pop(name) for name in REASONING if name in fields]
    fields["content"] = _text(fields, number)
    if any(reasoning):
        fields[REASONING[0]] = next(str(each) for each in reasoning if each)
    calls = fields.pop("tool_calls", None)
    if calls := calls or fields.pop("function_call", None):
        fields["tool_calls"] = _calls(calls, number, required)
    for name, value in flags.items() if fields["role"] == REPLY else ():
        if value not in (0, 1):
            raise WrongMessages(f"messages whose {name} is 0 or 1; that of message {number} is {value!r}")
        if not value:
            fields["train"] = False
            break
    return fields


def _has_role(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    return isinstance(message.get("role"), str) or (isinstance(message.get("from"), str) and "value" in message)


def _of_sharegpt(fields: Mapping[str, Any], number: int) -> dict[str, Any]:
    speaker = fields["from"]
    if speaker not in SHAREGPT:
        raise WrongMessages(f"messages from {', '.join(SHAREGPT)}; message {number} is from {speaker}")
    others = {name: value for name, value in fields.items() if name not in ("from", "value")}
    text = fields.get("value")
    if speaker == "function_call":
        calls = of_json(text)
        return {"role": REPLY, "tool_calls": calls if isinstance(calls, list) else [calls], **others}
    return {"role": SHAREGPT[speaker], "content": text, **others}


def _text(message: Message, number: int) -> str:
    """Return the text of a message; a reply that only calls tools has none."""
    content = message.get("content", "" if message["role"] in (REPLY, "tool") else None)
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) and "type" in content:
        content = [content]
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping | str) for part in content):
        raise WrongMessages(f"messages whose content is text; that of message {number} is {type(content).__name__}")

    parts = [{"text": part} if isinstance(part, str) else part for part in content]
    other = next((part.get("type") for part in parts if part.get("type") not in TEXT_PARTS), None)
    if other is not None:
        raise WrongMessages(f"messages of text; message {number} has a part of type {other}")
    return "".join(str(part.get("text") or "") for part in parts)


def _calls(calls: Any, number: int, required: Mapping[str, Sequence[str]] | None) -> list[dict[str, Any]]:
    found = []
    calls = of_json(calls)
    for call in calls if isinstance(calls, list) else [calls]:
        call = {name: value for name, value in call.items() if value is not None} if isinstance(call, Mapping) else {}
        function = call.pop("function", None) or {key: call.pop(key) for key in ("name", "arguments") if key in call}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            accepted = 'messages whose tool_calls are [{"type": "function", "function": {"name", "arguments"}}]'
            raise WrongMessages(f"{accepted}; message {number} has others")

        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            value = of_json(arguments)
            arguments = value if isinstance(value, Mapping) else arguments  # the policy's own bad JSON stays text
        elif required is not None and isinstance(arguments, Mapping):
            real = required.get(function["name"], ())
            arguments = {
                name: without_nulls(value) for name, value in arguments.items() if value is not None or name in real
            }
        function = {name: value for name, value in function.items() if value is not None}
        found.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return found

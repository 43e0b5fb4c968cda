"""Map a raw record to a row: dotted field paths, chat messages, and the answer inside a worked solution.

Invariants:
- A row has a question and, if the run needs it, an answer: text that UTF-8 can encode, and not blank, unless it may be.
  A record without them raises a `ConfigError` that names the setting, the file and the row, counted from 1.
- Messages are taken whole or refused: no message and no role is left out. The last one of a prompt is a user's or a
  tool's, so that the policy replies to it; that of a demonstration is the reply to imitate.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.config.data import RESERVED, TEMPLATE_KWARGS, DataConfig
from app.errors import ConfigError
from app.utils.chat_messages import REPLY, Message, WrongMessages, messages_in, normalized, of_json, without_nulls

WITHOUT = "data.answer=null trains without one, if no reward needs it"
ASKERS = ("user", "tool")  # roles of messages that a policy replies to


@dataclass(frozen=True, slots=True)
class Row:
    """A question with its reference answer, before templating. All sources produce this."""

    question: str  # of messages: the text of the last one
    answer: str  # empty with data.answer=null
    source: str  # name of the data set
    index: int  # in its file, from 0; independent of dropped rows
    columns: Mapping[str, Any]  # all of them, as JSON values
    messages: tuple[Message, ...] = ()  # if the question is a column of chat messages
    reply: Message | None = None  # to imitate
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the chat template: `tools`, and its own

    @property
    def prompt_key(self) -> str:
        """Key for duplicate prompts: the question, or more than one message."""
        return self.question if len(self.messages) < 2 else json.dumps(self.messages)


@dataclass(frozen=True, slots=True)
class RowMapper:
    """Maps the records of one set to rows, by the fields that `config` names."""

    config: DataConfig
    source: str  # name of the set
    replies: bool = False  # rows have a reply to imitate: the last message, or the whole answer
    may_be_blank: bool = False  # an environment may have its own ways to ask and to judge

    def row(self, record: Mapping[str, Any], index: int, place: str, *, padded: bool = False) -> Row:
        """Map record `index` to a row. `padded`: its values are Arrow's, see `normalized`.

        Raises `ConfigError`, which names the `place`, if it has no question or no answer.
        """
        config = self.config
        columns = {
            sys.intern(str(name)): plain(value)
            for name, value in record.items()
            if not isinstance(value, bytes | bytearray)
        }
        if padded:
            names = {(config.tools or "").partition(".")[0], TEMPLATE_KWARGS} & columns.keys()
            columns |= {name: without_nulls(columns[name]) for name in names}

        template_kwargs = self._template_kwargs(columns, place)
        messages = self._messages(columns, place, template_kwargs.get("tools", ()), padded)
        reply = None
        if self.replies and messages:
            *before, reply = messages
            messages = tuple(before)
        question = messages[-1]["content"] if messages else self._text(columns, "question", config.question, place)
        if config.context is not None and not messages:
            question += f"\n\n{self._context(columns, config.context, place)}"

        answer = self._answer(columns, reply, place)
        if self.replies and reply is None:
            reply = {"role": REPLY, "content": answer}
        if config.answer is not None and config.answer_after:
            _, marker, answer = answer.rpartition(config.answer_after)
            answer = answer.strip()
            if not marker or not answer:
                accepted = f"a marker that precedes every answer; {place} has no answer after it"
                raise _error("answer_after", config.answer_after, accepted)
        return Row(question, answer, self.source, index, columns, messages, reply, template_kwargs)

    def _answer(self, columns: Mapping[str, Any], reply: Message | None, place: str) -> str:
        """Return the whole answer; without a field of its own, the text of the reply."""
        path = self.config.answer
        own = Missing("") if path is None else find(columns, path)
        if reply is not None and (isinstance(own, Missing) or messages_in(own) is not None):
            content: str = reply["content"]
            return content
        if path is None and self.replies:
            raise ConfigError("data.answer", None, f"the field of the reply; {place} is no conversation")
        return "" if path is None else self._text(columns, "answer", path, place)

    def _template_kwargs(self, columns: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the tools of a row, from a list of JSON schemas or its text, and its variables of the template."""
        found: dict[str, Any] = {}
        if self.config.tools is not None:
            value = of_json(find(columns, self.config.tools))
            if value is not None and not (isinstance(value, list) and all(isinstance(each, Mapping) for each in value)):
                instead = value.instead if isinstance(value, Missing) else f"a {type(value).__name__}"
                accepted = f"a field with a list of JSON schemas, or its text; {place} has {instead}"
                raise _error("tools", self.config.tools, accepted)
            found = {"tools": value} if value else {}

        own = of_json(columns.get(TEMPLATE_KWARGS)) or {}
        if not isinstance(own, Mapping) or RESERVED.intersection(own):
            accepted = f"variables of the chat template without {', '.join(sorted(RESERVED))}, as {place} has"
            raise ConfigError(f"data.{TEMPLATE_KWARGS}", own, accepted)
        return {**own, **found}

    def _messages(
        self, columns: Mapping[str, Any], place: str, tools: Sequence[Mapping[str, Any]], padded: bool
    ) -> tuple[Message, ...]:
        """Return the messages of the question's field; none if it has text."""
        path, answer = self.config.question, self.config.answer
        self._require_whole(columns, place)
        value = messages_in(find(columns, path))
        if value is None:
            return ()
        try:
            messages = normalized(value, padded=padded, tools=tools)
            reply = messages_in(find(columns, answer)) if self.replies and answer else None
            if reply is not None:  # TRL's rows of prompt and completion: the prompt's replies are not imitated
                before = ({**each, "train": False} if each["role"] == REPLY else each for each in messages)
                messages = (*before, *normalized(reply, padded=padded, tools=tools))
            _require_roles(messages, replied=self.replies)
        except WrongMessages as error:
            raise _error("question", path, f"{error} in {place}") from error

        for message in messages[-1 - self.replies :]:
            content = message["content"].strip() or message.get("tool_calls") or message["role"] == "tool"
            if not content and not self.may_be_blank:
                accepted = f"messages with text; the last of the role {message['role']} is empty in {place}"
                raise _error("question", path, accepted)
        for message in messages:
            _require_unicode("question", path, message["content"], place)
        return messages

    def _require_whole(self, columns: Mapping[str, Any], place: str) -> None:
        """Raise `ConfigError` for a path to one message of several: `prompt.0.content` may be the system message's."""
        steps = self.config.question.split(".")
        for count in range(1, len(steps)):
            path = ".".join(steps[:count])
            messages = messages_in(find(columns, path)) or ()
            if len(messages) > 1:
                accepted = f"{path}, all of its messages: {place} has {len(messages)} of them"
                raise _error("question", self.config.question, accepted)

    def _text(self, columns: Mapping[str, Any], name: str, path: str, place: str) -> str:
        value = find(columns, path)
        if isinstance(value, Missing):
            raise _error(name, path, f"a field of the rows; {place} has {value.instead}")

        # pandas writes a missing value as NaN
        nan = isinstance(value, float) and not math.isfinite(value)
        if isinstance(value, bool) or not isinstance(value, str | int | float) or nan:
            kind = "null" if value is None else "NaN" if nan else f"a {type(value).__name__}"
            raise _error(name, path, f"a text field; it is {kind} in {place}")

        text = str(value)
        if not text.strip() and not self.may_be_blank:
            raise _error(name, path, f"a text field; it is empty in {place}")
        _require_unicode(name, path, text, place)
        return text

    def _context(self, columns: Mapping[str, Any], path: str, place: str) -> str:
        """Return a field as text, the items of a list one a line."""
        items = find(columns, path)
        if not isinstance(items, list):
            return self._text(columns, "context", path, place)
        return "\n".join(self._text(columns, "context", f"{path}.{index}", place) for index in range(len(items)))


def _error(name: str, value: str, accepted: str) -> ConfigError:
    return ConfigError(f"data.{name}", value, accepted, WITHOUT if name == "answer" else "")


def _require_unicode(name: str, path: str, text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = ascii(text[error.start])
        accepted = f"a field of valid Unicode; {place} has the unpaired surrogate {surrogate}"
        raise _error(name, path, accepted) from error


def _require_roles(messages: Sequence[Message], *, replied: bool) -> None:
    """Raise `WrongMessages` unless normalized messages are a prompt or, with `replied`, one and the reply to it."""
    *before, last = [message["role"] for message in messages]
    if not replied and last not in ASKERS:
        raise WrongMessages(f"messages of which a user's or a tool's is the last; the last one is of the role {last}")
    if not replied:
        return
    if last != REPLY:
        raise WrongMessages(f"messages that end with a reply of the role {REPLY}; the last one is of the role {last}")
    if not before or before[-1] not in ASKERS:
        found = f"one of the role {before[-1]}" if before else "nothing"
        raise WrongMessages(f"messages whose last reply follows a user's or a tool's message; it follows {found}")
    if not any(message.get("train", message["role"] == REPLY) for message in messages[1:]):
        raise WrongMessages("messages of which a reply is trained on; none is")


def plain(value: Any) -> Any:
    """Convert a value of a record to JSON types; other types, such as dates, become text.

    >>> from datetime import date
    >>> plain({"due": date(2026, 1, 31), "tags": ("a", None)})
    {'due': '2026-01-31', 'tags': ['a', None]}
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)  # numpy's scalars and arrays


@dataclass(frozen=True, slots=True)
class Missing:
    """Result for a path that does not exist."""

    instead: str  # what the record has there instead


def find(record: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or `Missing`.

    >>> find({"prompt": [{"content": "1+1="}]}, "prompt.0.content")
    '1+1='
    """
    value: Any = record
    for step in path.split("."):
        items = isinstance(value, Sequence) and not isinstance(value, str)
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif items and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, Mapping):
            return Missing("only " + ", ".join(map(str, value)) if value else "no fields")
        elif items:
            return Missing(f"a list of {len(value)} there")
        else:
            return Missing("null there" if value is None else f"a {type(value).__name__} there")
    return value

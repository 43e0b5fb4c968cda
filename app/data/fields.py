"""Map a raw record to a row: dotted field paths, chat messages, and the answer inside a worked solution.

Invariants:
- A row has a question and, if the run needs it, an answer: text that UTF-8 can encode, and not blank, unless it may be.
  A record without them raises a `ConfigError` that names the key, the file and the row, counted from 1.
- A question out of a conversation is the whole conversation.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.config.data import RESERVED, TEMPLATE_KWARGS
from app.data.records.messages import REPLY, Message, WrongMessages, checked, messages_in, normalized
from app.errors import ConfigError
from app.utils.chat_messages import of_json, without_nulls

WITHOUT = "data.answer=null trains without one, if no reward needs it"


@dataclass(frozen=True, slots=True)
class Row:
    """A question with its reference answer, before templating. All sources produce this."""

    question: str  # of messages: what the last one says
    answer: str  # empty with data.answer=null
    source: str  # name of the data set
    index: int  # in its file, from 0; independent of dropped rows
    columns: Mapping[str, Any]  # all of them, as JSON values
    messages: tuple[Message, ...] = ()  # if the question is a column of chat messages
    reply: Message | None = None  # to imitate
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the chat template: `tools`, and its own

    @property
    def asked(self) -> str:
        """What rows with the same prompt have in common: the question, or more than one message."""
        return self.question if len(self.messages) < 2 else json.dumps(self.messages)


@dataclass(frozen=True, slots=True)
class FieldMap:
    """The record fields of question and answer, and the configuration section that defines them."""

    key: str  # section named in errors, e.g. "data" or "data.eval_sets.test"
    question: str
    answer: str | None  # None: rows have none
    answer_after: str | None
    context: str | None = None  # a field that follows a question of text
    may_be_blank: bool = False  # an environment may have its own ways to ask and to judge
    replies: bool = False  # rows have a reply to imitate: the last message, or the whole answer
    tools: str | None = None

    def row(self, record: Mapping[str, Any], *, source: str, index: int, place: str, padded: bool = False) -> Row:
        """Map a record to a row.

        Args:
            index: Index among the records, from 0.
            place: Row and file named in errors: "row 3 of rows.jsonl".
            padded: The values are Arrow's, see `normalized`.

        Raises:
            ConfigError: If the record has no question or no answer.
        """
        columns = {
            sys.intern(str(name)): plain(value)
            for name, value in record.items()
            if not isinstance(value, bytes | bytearray)
        }
        for name in (self.tools or "").partition(".")[0], TEMPLATE_KWARGS:
            if padded and name in columns:
                columns[name] = without_nulls(columns[name])
        template_kwargs = self._template_kwargs(columns, place)
        messages = self._messages(columns, place, template_kwargs.get("tools", ()), padded)
        reply = None
        if self.replies and messages:
            *before, reply = messages
            messages = tuple(before)
        question = messages[-1]["content"] if messages else self._text(columns, "question", self.question, place)
        if self.context is not None and not messages:
            question += f"\n\n{self._context(columns, self.context, place)}"
        answer = self._answer(columns, reply, place)
        if self.replies and reply is None:
            reply = {"role": REPLY, "content": answer}
        if self.answer is not None and self.answer_after:
            answer = self._after(answer, self.answer_after, place)
        return Row(question, answer, source, index, columns, messages, reply, template_kwargs)

    def _answer(self, record: Mapping[str, Any], reply: Message | None, place: str) -> str:
        """Return the whole answer; without a field of its own, what the reply says."""
        own = Missing("") if self.answer is None else find(record, self.answer)
        if reply is not None and (isinstance(own, Missing) or messages_in(own) is not None):
            content: str = reply["content"]
            return content
        if self.answer is None and self.replies:
            raise ConfigError(f"{self.key}.answer", None, f"the field of the reply; {place} is no conversation")
        return "" if self.answer is None else self._text(record, "answer", self.answer, place)

    def _template_kwargs(self, record: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the tools of a row, from a list of JSON schemas or its text, and its variables of the template."""
        found: dict[str, Any] = {}
        if self.tools is not None:
            value = of_json(find(record, self.tools))
            if value is not None and not (isinstance(value, list) and all(isinstance(each, Mapping) for each in value)):
                instead = value.instead if isinstance(value, Missing) else f"a {type(value).__name__}"
                accepted = f"a field with a list of JSON schemas, or its text; {place} has {instead}"
                raise ConfigError("data.tools", self.tools, accepted)
            found = {"tools": value} if value else {}

        own = of_json(record.get(TEMPLATE_KWARGS)) or {}
        if not isinstance(own, Mapping) or RESERVED.intersection(own):
            accepted = f"variables of the chat template without {', '.join(sorted(RESERVED))}, as {place} has"
            raise ConfigError(f"data.{TEMPLATE_KWARGS}", own, accepted)
        return {**own, **found}

    def _messages(
        self, record: Mapping[str, Any], place: str, tools: Sequence[Mapping[str, Any]], padded: bool
    ) -> tuple[Message, ...]:
        """Return the messages of the question's field; none if it has text."""
        self._require_whole(record, place)
        value = messages_in(find(record, self.question))
        if value is None:
            return ()
        try:
            messages = normalized(value, padded=padded, tools=tools)
            reply = messages_in(find(record, self.answer)) if self.replies and self.answer else None
            if reply is not None:  # TRL's rows of prompt and completion: the prompt's replies are not imitated
                asked = ({**each, "train": False} if each["role"] == REPLY else each for each in messages)
                messages = (*asked, *normalized(reply, padded=padded, tools=tools))
            checked(messages, replied=self.replies)
        except WrongMessages as error:
            raise self._error("question", self.question, f"{error} in {place}") from error
        for message in messages[-1 - self.replies :]:
            says = message["content"].strip() or message.get("tool_calls") or message["role"] == "tool"
            if not says and not self.may_be_blank:
                accepted = f"messages with text; the last of the role {message['role']} is empty in {place}"
                raise self._error("question", self.question, accepted)
        for message in messages:
            self._require_unicode("question", self.question, message["content"], place)
        return messages

    def _require_whole(self, record: Mapping[str, Any], place: str) -> None:
        """Raise `ConfigError` for a path to one message of several: `prompt.0.content` may be the system message's."""
        steps = self.question.split(".")
        for count in range(1, len(steps)):
            path = ".".join(steps[:count])
            parent = find(record, path)
            messages = messages_in(parent) or ()
            if len(messages) > 1:
                accepted = f"{path}, all of its messages: {place} has {len(messages)} of them"
                raise self._error("question", self.question, accepted)

    def _text(self, record: Mapping[str, Any], name: str, path: str, place: str) -> str:
        value = find(record, path)
        if isinstance(value, Missing):
            raise self._error(name, path, f"a field of the rows; {place} has {value.instead}")

        nan = isinstance(value, float) and not math.isfinite(value)  # how pandas writes a value that is missing
        if isinstance(value, bool) or not isinstance(value, str | int | float) or nan:
            kind = "null" if value is None else "NaN" if nan else f"a {type(value).__name__}"
            raise self._error(name, path, f"a text field; it is {kind} in {place}")

        text = str(value)
        if not text.strip() and not self.may_be_blank:
            raise self._error(name, path, f"a text field; it is empty in {place}")

        self._require_unicode(name, path, text, place)
        return text

    def _context(self, record: Mapping[str, Any], path: str, place: str) -> str:
        """Return a field as text, the items of a list one a line."""
        items = find(record, path)
        if not isinstance(items, list):
            return self._text(record, "context", path, place)
        return "\n".join(self._text(record, "context", f"{path}.{index}", place) for index in range(len(items)))

    def _require_unicode(self, name: str, path: str, text: str, place: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            surrogate = ascii(text[error.start])
            accepted = f"a field of valid Unicode; {place} has the unpaired surrogate {surrogate}"
            raise self._error(name, path, accepted) from error

    def _after(self, answer: str, marker: str, place: str) -> str:
        _, match, last = answer.rpartition(marker)
        if not match or not last.strip():
            accepted = f"a marker that precedes every answer; {place} has no answer after it"
            raise self._error("answer_after", marker, accepted)
        return last.strip()

    def _error(self, name: str, value: str, accepted: str) -> ConfigError:
        return ConfigError(f"{self.key}.{name}", value, accepted, WITHOUT if name == "answer" else "")


def plain(value: Any) -> Any:
    """Return a value of a record as JSON values; other types, such as dates, as text.

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
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, Sequence) and not isinstance(value, str) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return Missing(_describe(value))
    return value


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "only " + ", ".join(map(str, value)) if value else "no fields"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a list of {len(value)} there"
    return "null there" if value is None else f"a {type(value).__name__} there"

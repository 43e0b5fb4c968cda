"""From a raw record to a row: dotted field paths, and the answer inside a worked solution.

Always holds: a row that comes out has a question and an answer that are not blank. A record that cannot give them is a
`ConfigError` that names the key, the file and the row, counted from 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.data.row import Row
from app.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Which fields of a record are the question and the answer, and which configuration keys said so."""

    key: str  # the section of the configuration that is to blame, e.g. "data" or "data.eval_sets.test"
    where: str  # the file or data set, for messages
    question: str
    answer: str
    answer_after: str | None

    def row(self, record: Mapping[str, Any], *, source: str, index: int, number: int) -> Row:
        """The row of a record; `number` is the line or row that a reader of the file would count."""
        question = self._text(record, "question", self.question, number)
        answer = self._text(record, "answer", self.answer, number)
        if self.answer_after:
            answer = self._after(answer, self.answer_after, number)
        return Row(question=question, answer=answer, source=source, index=index)

    def _text(self, record: Mapping[str, Any], name: str, path: str, number: int) -> str:
        value = find(record, path)
        if isinstance(value, Missing):
            raise self._refused(name, path, f"a field of the rows; row {number} of {self.where} has {value.instead}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            kind = "null" if value is None else f"a {type(value).__name__}"
            raise self._refused(name, path, f"a field with text; it is {kind} in row {number} of {self.where}")
        text = str(value)
        if not text.strip():
            raise self._refused(name, path, f"a field with text; it is empty in row {number} of {self.where}")
        return text

    def _after(self, answer: str, marker: str, number: int) -> str:
        _, found, last = answer.rpartition(marker)
        if not found or not last.strip():
            accepted = f"a text that the answer stands after; row {number} of {self.where} has no answer after it"
            raise self._refused("answer_after", marker, accepted)
        return last.strip()

    def _refused(self, name: str, value: str, accepted: str) -> ConfigError:
        return ConfigError(f"{self.key}.{name}={value} is not accepted: give {accepted}.")


@dataclass(frozen=True, slots=True)
class Missing:
    """A path that leads nowhere."""

    instead: str  # what is there in its place


def find(record: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or `Missing`.

    >>> find({"prompt": [{"content": "1+1="}]}, "prompt.0.content")
    '1+1='
    """
    value: Any = record
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return Missing(_describe(value))
    return value


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "only " + ", ".join(map(str, value)) if value else "no fields"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a list of {len(value)} there"
    return "null there" if value is None else f"a {type(value).__name__} there"

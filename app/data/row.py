"""A row of a data set after field mapping: what every source hands on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A question with its reference answer, before any template."""

    question: str
    answer: str
    source: str  # the data set's name
    index: int  # the row's place in its file, from 0; stays the same when other rows are left out

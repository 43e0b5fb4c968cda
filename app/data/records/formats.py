"""The formats of data files: JSON lines, a JSON list, CSV, and Parquet; text also compressed with gzip.

Invariants:
- A file that cannot be read raises a `ConfigError` that names the key and the file.
- A row that cannot be parsed is a record with a `ConfigError` in place of its values.
- The values of a CSV file are text: 007 stays 007.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from app.errors import ConfigError, one_line

JSON_LINES = (".jsonl", ".ndjson")
JSON = ".json"  # lines, or one list
CSV = ".csv"
PARQUET = ".parquet"
GZIP = ".gz"  # after any but Parquet, which is compressed
ENDINGS = (*JSON_LINES, JSON, CSV, *(f"{each}{GZIP}" for each in (*JSON_LINES, JSON, CSV)), PARQUET)

BATCH_ROWS = 4096
MAX_ERROR_CHARACTERS = 200  # of a library's message inside ours
MAX_CELL = 2**31 - 1  # characters of a CSV cell


@dataclass(frozen=True, slots=True)
class Record:
    """One raw row of a file or data set."""

    where: str  # file or data set named in errors
    number: int  # line or row in it, from 1
    values: dict[str, Any] | ConfigError  # the error of a row that cannot be parsed
    left_out: Sequence[str] = ()  # columns of bytes
    padded: bool = False  # of Arrow, whose structs have the keys of all rows: those of other rows are null


Records = Iterator[Record]


def read(file: Path, key: str) -> Records:
    """Read the records of a file, lazily, in the format that the end of its name says.

    Args:
        key: Setting named in errors, e.g. "data.path".

    Raises:
        ConfigError: If the format is unknown or the file cannot be read.
    """
    ending = file.name.lower().removesuffix(GZIP)
    if ending.endswith(PARQUET) and not file.name.lower().endswith(GZIP):
        return _parquet(file, key)
    if ending.endswith((*JSON_LINES, JSON)):
        return _json(file, key, may_be_list=ending.endswith(JSON))
    if ending.endswith(CSV):
        return _csv(file, key)
    raise ConfigError(key, str(file), f"a file that ends in {', '.join(ENDINGS)}, or the id of a hub data set")


def _json(file: Path, key: str, *, may_be_list: bool) -> Records:
    with _open(file, key, "JSON") as text:
        if may_be_list and _starts_with_bracket(text):
            yield from _json_list(text, file, key)
            return

        for number, line in enumerate(text, start=1):
            if line.strip():
                yield Record(str(file), number, _parsed(line, number, file, key))


def _starts_with_bracket(text: TextIO) -> bool:
    first = next((line.lstrip() for line in text if line.strip()), "")
    text.seek(0)
    return first.startswith("[")


def _json_list(text: TextIO, file: Path, key: str) -> Records:
    try:
        rows = json.load(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(key, str(file), f"a list of JSON objects; it is not JSON ({brief(error)})") from error

    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            yield Record(str(file), number, row)
        else:
            accepted = f"a list of JSON objects; row {number} is a {type(row).__name__}"
            yield Record(str(file), number, ConfigError(key, str(file), accepted))


def _parsed(line: str, number: int, file: Path, key: str) -> dict[str, Any] | ConfigError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # a ValueError also for an integer of too many digits
        return ConfigError(key, str(file), f"one JSON object a line; line {number} is not JSON ({brief(error)})")
    if not isinstance(row, dict):
        return ConfigError(key, str(file), f"one JSON object a line; line {number} is a {type(row).__name__}")
    return row


def _csv(file: Path, key: str) -> Records:
    csv.field_size_limit(MAX_CELL)
    with _open(file, key, "CSV") as text:
        lines = csv.reader(text, strict=True)
        header = [name.strip() for name in next(lines, [])]

        # A row may span several lines; errors give its number.
        for number, cells in enumerate((cells for cells in lines if cells), start=1):
            values: dict[str, Any] | ConfigError = dict(zip(header, cells, strict=False))
            if len(cells) != len(header):
                accepted = (
                    f"rows of as many cells as the header; row {number} has {len(cells)} instead of {len(header)}"
                )
                values = ConfigError(key, str(file), accepted)
            yield Record(str(file), number, values)


@contextmanager
def _open(file: Path, key: str, kind: str) -> Iterator[TextIO]:
    """Open a text file, compressed or not; errors while it is read become a `ConfigError`."""
    compressed = file.name.lower().endswith(GZIP)
    try:
        with gzip.open(file) if compressed else file.open("rb") as data:
            yield io.TextIOWrapper(data, encoding="utf-8-sig", newline="" if kind == "CSV" else None)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        packed = " compressed with gzip" if compressed else ""
        accepted = f"a readable {kind} file in UTF-8{packed} ({brief(error)})"
        raise ConfigError(key, str(file), accepted) from error


def _parquet(file: Path, key: str) -> Records:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            kept = columns(table.schema_arrow)
            left_out = [name for name in table.schema_arrow.names if name not in kept]
            yield from numbered(table.iter_batches(batch_size=BATCH_ROWS, columns=kept), str(file), left_out)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:  # a date may be beyond Python's
        raise ConfigError(key, str(file), f"a readable Parquet file ({brief(error)})") from error


def columns(schema: Any) -> list[str]:
    """Names of the columns of an Arrow schema that JSON can express: those without bytes."""
    return [column.name for column in schema if not _has_bytes(column.type)]


def _has_bytes(kind: Any) -> bool:
    """Whether an Arrow type is binary or, at any depth, contains one that is."""
    children = [kind.field(index).type for index in range(kind.num_fields)]
    return any(map(_has_bytes, children)) if children else "binary" in str(kind)


def numbered(batches: Iterable[Any], where: str, left_out: Sequence[str]) -> Records:
    """Number the rows of Arrow batches from 1. `left_out`: columns that the batches do not have."""
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            yield Record(where, number, values, left_out, padded=True)


def brief(error: Exception) -> str:
    """First line of an error, shortened to fit into a sentence."""
    return one_line(error).rstrip(".")[:MAX_ERROR_CHARACTERS]

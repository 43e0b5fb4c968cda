"""Raw records: files, patterns of files and hub data sets.

    path ── a list ───────→ its entries, one after the other
         ── a pattern ────→ the matching files, sorted
         ── a local file ─→ JSON lines, a JSON list, CSV (each also .gz) or Parquet, by the end of its name
         ── else ─────────→ a hub data set, or a folder that `datasets` can load

Invariants:
- A path that exists as a file is read locally and never looked up on the hub.
- Unreadable data raises a `ConfigError` that names the key and the file. A row that cannot be parsed is a record with
  a `ConfigError` in place of its values, so that reading can go on after it.
- The values of a CSV file are text: 007 stays 007. Columns of bytes, such as images, are left out.
"""

import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from app.errors import ConfigError, one_line
from app.utils.hub import hub_client

TEXT = (".jsonl", ".ndjson", ".json", ".csv")  # .json: lines, or one list
GZIP = ".gz"
PARQUET = ".parquet"
ENDINGS = (*TEXT, *(f"{each}{GZIP}" for each in TEXT), PARQUET)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
PATTERN = re.compile(r"[*?\[]")

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


def is_remote(path: str | list[str]) -> bool:
    """Whether a part of a path is a hub data set, or a folder, which is read as one."""
    parts = [path] if isinstance(path, str) else path
    return any(_is_hub_id(part) or Path(part).expanduser().is_dir() for part in parts)


def has_splits(path: str | list[str]) -> bool:
    """Whether other splits can be read beside this one: a hub data set or a folder, no files."""
    return isinstance(path, str) and not _is_file(path) and PATTERN.search(path) is None


def read(path: str | list[str], *, subset: str | None, split: str, key: str) -> Records:
    """Read the records of files or of a hub data set, lazily. Errors name the setting `key`."""
    for part in [path] if isinstance(path, str) else path:
        sources = [part]
        if PATTERN.search(part) is not None and not _is_file(part):
            found = glob.glob(str(Path(part).expanduser()), recursive=True)
            sources = sorted(each for each in found if Path(each).is_file())
        if not sources:
            raise ConfigError(key, part, "a pattern that matches a file; there is none")
        for source in sources:
            yield from _file(Path(source).expanduser(), key) if _is_file(source) else _hub(source, subset, split, key)


def _is_file(path: str) -> bool:
    return Path(path).expanduser().is_file()


def _is_hub_id(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and not path.lower().endswith(ENDINGS) and not _is_file(path)


def _file(file: Path, key: str) -> Records:
    ending = next((each for each in ENDINGS if file.name.lower().endswith(each)), "")
    if not ending:
        raise ConfigError(key, str(file), f"a file that ends in {', '.join(ENDINGS)}, or the id of a hub data set")
    if ending == PARQUET:
        return _parquet(file, key)
    if ending.startswith(".csv"):
        return _csv(file, key)
    return _json(file, key, may_be_list=ending.removesuffix(GZIP) == ".json")


def _json(file: Path, key: str, *, may_be_list: bool) -> Records:
    """Read JSON lines, or a list. Own reading: Arrow writes nulls into the messages of rows with other fields."""
    with _open(file, key, "JSON") as text:
        first = next((line.lstrip() for line in text if line.strip()), "")
        text.seek(0)
        rows = ((number, _parsed(line, number, file, key)) for number, line in enumerate(text, start=1) if line.strip())
        for number, row in _listed(text, file, key) if may_be_list and first.startswith("[") else rows:
            if not isinstance(row, dict | ConfigError):
                accepted = f"JSON objects, one a line or in a list; row {number} is a {type(row).__name__}"
                row = ConfigError(key, str(file), accepted)
            yield Record(str(file), number, row)


def _parsed(line: str, number: int, file: Path, key: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # a ValueError also for an integer of too many digits
        return ConfigError(key, str(file), f"one JSON object a line; line {number} is not JSON ({_brief(error)})")


def _listed(text: TextIO, file: Path, key: str) -> Iterator[tuple[int, Any]]:
    try:
        return enumerate(json.load(text), start=1)
    except (ValueError, RecursionError) as error:
        raise ConfigError(key, str(file), f"a list of JSON objects; it is not JSON ({_brief(error)})") from error


def _csv(file: Path, key: str) -> Records:
    csv.field_size_limit(MAX_CELL)
    with _open(file, key, "CSV") as text:
        lines = csv.reader(text, strict=True)
        header = [name.strip() for name in next(lines, [])]

        # A row may span several lines; errors give its number.
        for number, cells in enumerate((cells for cells in lines if cells), start=1):
            values: dict[str, Any] | ConfigError = dict(zip(header, cells, strict=False))
            if len(cells) != len(header):
                accepted = "rows of as many cells as the header"
                why = f"row {number} has {len(cells)} instead of {len(header)}"
                values = ConfigError(key, str(file), f"{accepted}; {why}")
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
        accepted = f"a readable {kind} file in UTF-8{packed} ({_brief(error)})"
        raise ConfigError(key, str(file), accepted) from error


def _parquet(file: Path, key: str) -> Records:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            kept = _columns(table.schema_arrow)
            left_out = [name for name in table.schema_arrow.names if name not in kept]
            yield from _numbered(table.iter_batches(batch_size=BATCH_ROWS, columns=kept), str(file), left_out)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:  # a date may be beyond Python's
        raise ConfigError(key, str(file), f"a readable Parquet file ({_brief(error)})") from error


def _hub(path: str, subset: str | None, split: str, key: str) -> Records:
    if not is_remote(path):
        accepted = f"an existing file ({', '.join(ENDINGS)}), or the id of a hub data set"
        where = "" if Path(path).expanduser().is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(key, path, accepted, f"there is no such file{where}")

    try:
        import datasets
    except ImportError as error:
        raise ConfigError(key, path, "a local file, or install the 'datasets' library to use the hub") from error

    where = f"split {split}" + (f" of subset {subset}" if subset else "")
    with nullcontext(True) if Path(path).expanduser().is_dir() else hub_client() as online:
        try:
            table = datasets.load_dataset(path, subset, split=split)
        # The hub client passes on errors of half a dozen libraries, without a common base class.
        except Exception as error:
            accepted = f"a data set that can be loaded; {where} failed to load ({_brief(error)})"
            if not online:
                accepted = f"a local file: the hub cannot be reached from here, and its cache has no {where}"
            raise ConfigError(key, path, accepted) from error

    kept = _columns(table.features.arrow_schema)
    left_out = [name for name in table.column_names if name not in kept]
    batches = table.select_columns(kept).with_format("arrow").iter(batch_size=BATCH_ROWS)
    yield from _numbered(batches, path, left_out)


def _columns(schema: Any) -> list[str]:
    """Names of the columns of an Arrow schema that JSON can express: those without bytes."""
    return [column.name for column in schema if not _has_bytes(column.type)]


def _has_bytes(kind: Any) -> bool:
    """Whether an Arrow type is binary or, at any depth, contains one that is."""
    children = [kind.field(index).type for index in range(kind.num_fields)]
    return any(map(_has_bytes, children)) if children else "binary" in str(kind)


def _numbered(batches: Iterable[Any], where: str, left_out: Sequence[str]) -> Records:
    """Number the rows of Arrow batches from 1. `left_out`: columns that the batches do not have."""
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            yield Record(where, number, values, left_out, padded=True)


def _brief(error: Exception) -> str:
    """First line of an error, shortened to fit into a sentence."""
    return one_line(error).rstrip(".")[:MAX_ERROR_CHARACTERS]

"""Read raw records from a JSONL file, a Parquet file or a hub data set, as (number in the file, record) pairs.

Invariants:
- A path that exists as a file is read locally and never looked up on the hub.
- Unreadable data raises a `ConfigError` that names the key and the file.
- Columns of bytes, such as images, are left out.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.errors import ConfigError, one_line

JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
BATCH_ROWS = 4096
MAX_ERROR_CHARACTERS = 200  # of a library's message inside ours
Records = Iterator[tuple[int, dict[str, Any]]]  # (number from 1, record)


def local_file(path: str) -> Path | None:
    """Return the file at this path, or None if the path is not a local file."""
    file = Path(path).expanduser()
    return file if file.is_file() else None


def read(path: str, *, subset: str | None, split: str, key: str) -> Records:
    """Read the records of a file or a hub data set, lazily.

    Args:
        path: A JSONL or Parquet file, or the id of a hub data set.
        subset: Configuration of a hub data set.
        split: Split of a hub data set.
        key: Configuration section named in errors.

    Raises:
        ConfigError: If the data cannot be read.
    """
    file = local_file(path)
    if file is None:
        return _hub(path, subset, split, key)
    if file.suffix in JSON_LINES:
        return _json_lines(file, key)
    if file.suffix in PARQUET:
        return _parquet(file, key)
    raise _error(key, path, f"a file that ends in {', '.join(JSON_LINES + PARQUET)}, or the id of a hub data set")


def _json_lines(file: Path, key: str) -> Records:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _object(line, number, file, key)
    except (OSError, UnicodeDecodeError) as error:
        raise _error(key, str(file), f"a readable UTF-8 file of JSON lines ({_brief(error)})") from error


def _object(line: str, number: int, file: Path, key: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # a ValueError also for an integer of too many digits
        raise _error(key, str(file), f"one JSON object a line; line {number} is not JSON ({_brief(error)})") from error
    if not isinstance(record, dict):
        raise _error(key, str(file), f"one JSON object a line; line {number} is a {type(record).__name__}")
    return record


def _parquet(file: Path, key: str) -> Records:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = _columns(table.schema_arrow)
            yield from _numbered(table.iter_batches(batch_size=BATCH_ROWS, columns=columns))
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise _error(key, str(file), f"a readable Parquet file ({_brief(error)})") from error


def _hub(path: str, subset: str | None, split: str, key: str) -> Records:
    is_folder = Path(path).expanduser().is_dir()
    is_hub_id = HUB_ID.fullmatch(path) is not None and not path.lower().endswith(JSON_LINES + PARQUET)
    if not is_folder and not is_hub_id:
        raise _error(key, path, "an existing JSONL or Parquet file, or the id of a hub data set; there is no such file")

    try:
        import datasets
    except ImportError as error:
        raise _error(key, path, "a local file, or install the 'datasets' library to use the hub") from error

    try:
        table = datasets.load_dataset(path, subset, split=split)
    # The hub client passes on errors of half a dozen libraries, without a common base class.
    except Exception as error:
        where = f"split {split}" + (f" of subset {subset}" if subset else "")
        raise _error(key, path, f"a data set that can be loaded; {where} failed to load ({_brief(error)})") from error

    table = table.select_columns(_columns(table.features.arrow_schema))
    yield from _numbered(table.with_format("arrow").iter(batch_size=BATCH_ROWS))


def _columns(schema: Any) -> list[str]:
    """Names of the columns of an Arrow schema that JSON can express."""
    return [column.name for column in schema if not _has_bytes(column.type)]


def _has_bytes(kind: Any) -> bool:
    """Whether an Arrow type is binary or, at any depth, contains one that is."""
    children = [kind.field(index).type for index in range(kind.num_fields)]
    return any(map(_has_bytes, children)) if children else "binary" in str(kind)


def _numbered(batches: Iterator[Any]) -> Records:
    """Number the rows of Arrow batches from 1."""
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield number, record


def _brief(error: Exception) -> str:
    """First line of an error, shortened to fit into a sentence."""
    return one_line(error).rstrip(".")[:MAX_ERROR_CHARACTERS]


def _error(key: str, path: str, accepted: str) -> ConfigError:
    return ConfigError(f"{key}.path={path} is not accepted: give {accepted}.")

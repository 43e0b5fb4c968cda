"""Raw records from a JSONL file, a Parquet file or a hub data set, as (number in the file, record) pairs.

Always holds: a path that exists as a file is read here and never looked up on the hub; whatever cannot be read is one
`ConfigError` that names the key and the file. Only the asked columns of Parquet and hub data are decoded.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.errors import ConfigError

JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
BATCH_ROWS = 4096
Records = Iterator[tuple[int, dict[str, Any]]]  # (number from 1, record)


def local_file(path: str) -> Path | None:
    """The file that this path names, or None when it is to be looked up on the hub."""
    file = Path(path).expanduser()
    return file if file.is_file() else None


def read(path: str, *, subset: str | None, split: str, columns: Sequence[str], key: str) -> Records:
    """The records of a file or hub data set; `columns` are the top-level fields that will be asked for."""
    file = local_file(path)
    if file is None:
        return _hub(path, subset, split, columns, key)
    if file.suffix in JSON_LINES:
        return _json_lines(file, key)
    if file.suffix in PARQUET:
        return _parquet(file, columns, key)
    raise _refused(key, path, f"a file that ends in {', '.join(JSON_LINES + PARQUET)}, or the id of a hub data set")


def _json_lines(file: Path, key: str) -> Records:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _object(line, number, file, key)
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(key, str(file), f"a readable UTF-8 file of JSON lines ({_brief(error)})") from error


def _object(line: str, number: int, file: Path, key: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _refused(
            key, str(file), f"one JSON object a line; line {number} is not JSON ({_brief(error)})"
        ) from error
    if not isinstance(record, dict):
        raise _refused(key, str(file), f"one JSON object a line; line {number} is a {type(record).__name__}")
    return record


def _parquet(file: Path, columns: Sequence[str], key: str) -> Records:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            # without the asked columns, decode all of them: the message about the missing field will list them
            wanted = list(columns) if set(columns) <= set(names) else None
            yield from _numbered(table.iter_batches(batch_size=BATCH_ROWS, columns=wanted))
    except (OSError, pyarrow.ArrowException) as error:
        raise _refused(key, str(file), f"a readable Parquet file ({_brief(error)})") from error


def _hub(path: str, subset: str | None, split: str, columns: Sequence[str], key: str) -> Records:
    if not Path(path).expanduser().is_dir() and (
        not HUB_ID.fullmatch(path) or path.lower().endswith(JSON_LINES + PARQUET)
    ):
        raise _refused(
            key, path, "an existing JSONL or Parquet file, or the id of a hub data set; no such file is here"
        )
    try:
        import datasets
    except ImportError as error:
        raise _refused(key, path, "a local file, or install the 'datasets' library to use the hub") from error
    try:
        table = datasets.load_dataset(path, subset, split=split)
    # the hub's client lets through the errors of half a dozen libraries, without a common base
    except Exception as error:
        where = f"split {split}" + (f" of subset {subset}" if subset else "")
        raise _refused(key, path, f"a data set that can be loaded; {where} could not be ({_brief(error)})") from error
    if set(columns) <= set(table.column_names):
        table = table.select_columns(list(columns))
    yield from _numbered(table.with_format("arrow").iter(batch_size=BATCH_ROWS))


def _numbered(batches: Iterator[Any]) -> Records:
    """Rows of Arrow batches, counted from 1."""
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield number, record


def _brief(error: Exception) -> str:
    """The first line of an error, short enough for a sentence."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")[:200]


def _refused(key: str, path: str, accepted: str) -> ConfigError:
    return ConfigError(f"{key}.path={path} is not accepted: give {accepted}.")

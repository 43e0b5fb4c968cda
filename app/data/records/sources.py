"""Read raw records from files, hub data sets and functions.

    path ── a list ───────→ its entries, one after the other
         ── a pattern ────→ the matching files, sorted
         ── a local file ─→ `formats`, by the end of its name
         ── else ─────────→ a hub data set, or a folder that `datasets` can load

Invariants:
- A path that exists as a file is read locally and never looked up on the hub.
- Unreadable data raises a `ConfigError` that names the key and the file. A broken row is a record, so that reading can
  go on after it.
- Columns of bytes, such as images, are left out.
"""

import glob
import re
from contextlib import nullcontext
from pathlib import Path

from app.data.records import formats
from app.data.records.formats import Records, brief
from app.errors import ConfigError
from app.utils.hub import hub_client

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
PATTERN = re.compile(r"[*?\[]")


def local_file(path: str) -> Path | None:
    """Return the file at this path, or None if the path is not a local file."""
    file = Path(path).expanduser()
    return file if file.is_file() else None


def is_remote(path: str | list[str]) -> bool:
    """Whether a part of a path is a hub data set, or a folder, which is read as one."""
    parts = [path] if isinstance(path, str) else path
    return any(_is_hub_id(part) or Path(part).expanduser().is_dir() for part in parts)


def _is_hub_id(path: str) -> bool:
    is_id = HUB_ID.fullmatch(path) is not None and not path.lower().endswith(formats.ENDINGS)
    return is_id and local_file(path) is None


def has_splits(path: str | list[str] | None) -> bool:
    """Whether other splits can be read beside this one: a hub data set or a folder, no files."""
    return isinstance(path, str) and local_file(path) is None and PATTERN.search(path) is None


def read(path: str | list[str], *, subset: str | None, split: str, key: str) -> Records:
    """Read the records of files or of a hub data set, lazily.

    Args:
        path: A file, a pattern of files, the id of a hub data set, or a list of them.
        key: Setting named in errors, e.g. "data.path".

    Raises:
        ConfigError: If the data cannot be read.
    """
    for part in [path] if isinstance(path, str) else path:
        for source in _matches(part, key):
            file = local_file(source)
            yield from _hub(source, subset, split, key) if file is None else formats.read(file, key)


def _matches(path: str, key: str) -> list[str]:
    """Return the files that match a pattern, sorted; any other path as it is."""
    if local_file(path) is not None or PATTERN.search(path) is None:
        return [path]

    files = sorted(each for each in glob.glob(str(Path(path).expanduser()), recursive=True) if Path(each).is_file())
    if not files:
        raise ConfigError(key, path, "a pattern that matches a file; there is none")
    return files


def _hub(path: str, subset: str | None, split: str, key: str) -> Records:
    if not is_remote(path):
        accepted = f"an existing file ({', '.join(formats.ENDINGS)}), or the id of a hub data set"
        where = "" if Path(path).expanduser().is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(key, path, accepted, f"there is no such file{where}")

    try:
        import datasets
    except ImportError as error:
        raise ConfigError(key, path, "a local file, or install the 'datasets' library to use the hub") from error

    where = f"split {split}" + (f" of subset {subset}" if subset else "")
    is_folder = Path(path).expanduser().is_dir()
    with nullcontext(True) if is_folder else hub_client() as online:
        try:
            table = datasets.load_dataset(path, subset, split=split)
        # The hub client passes on errors of half a dozen libraries, without a common base class.
        except Exception as error:
            accepted = f"a data set that can be loaded; {where} failed to load ({brief(error)})"
            if not online:
                accepted = f"a local file: the hub cannot be reached from here, and its cache has no {where}"
            raise ConfigError(key, path, accepted) from error

    kept = formats.columns(table.features.arrow_schema)
    left_out = [name for name in table.column_names if name not in kept]
    batches = table.select_columns(kept).with_format("arrow").iter(batch_size=formats.BATCH_ROWS)
    yield from formats.numbered(batches, path, left_out)

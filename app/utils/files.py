"""File operations. All but a plain `replace_file` survive a machine crash: their result is on disk when they return."""

import os
import shutil
from pathlib import Path

UNFINISHED = ".tmp"  # ends the names of what nobody may rely on


def write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def replace_file(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file atomically: readers see the old content or the new, never a mix.

    Args:
        path: The file. Its folder must exist.
        content: Text is written as UTF-8.
        durable: Flush to disk before and after the rename, so that the new content survives a machine crash.
    """
    temporary = path.with_name(path.name + UNFINISHED)
    data = content.encode() if isinstance(content, str) else content

    with temporary.open("wb") as stream:
        stream.write(data)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())
    temporary.replace(path)

    if durable:
        sync(path.parent)


def sync(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete(path: Path) -> None:
    """Delete a folder so that no half of it looks like a whole one."""
    away = path.with_name(path.name + UNFINISHED)
    remove(away)
    path.rename(away)
    remove(away)


def remove(path: Path) -> None:
    """A file or folder, where there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def told(error: OSError) -> str:
    """What went wrong, with the file that it went wrong with."""
    return f"{error.strerror or error} ({error.filename})" if error.filename else str(error)

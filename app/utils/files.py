"""File operations whose result survives a crash of the machine: what returned is on the disk."""

import os
import shutil
from pathlib import Path

UNFINISHED = ".tmp"  # ends the names of what nobody may rely on


def write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


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

"""File operations whose result survives a crash of the machine: what returned is on the disk."""

import os
import shutil
from pathlib import Path

UNFINISHED = ".tmp"  # suffix of incomplete files and folders; readers ignore them


def write(file: Path, text: str) -> None:
    """Write a file and flush it to disk."""
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete(path: Path) -> None:
    """Delete a folder. A crash never leaves a partial folder under its name."""
    doomed = path.with_name(path.name + UNFINISHED)
    remove(doomed)
    path.rename(doomed)
    remove(doomed)


def remove(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def describe(error: OSError) -> str:
    """Return the reason of a file error and the file it concerns."""
    return f"{error.strerror or error} ({error.filename})" if error.filename else str(error)

"""CRC-32 of files: computed while a file is written, and again when it is read back.

CRC-32 finds accidental damage, not tampering. It is in the standard library and, at about 3 GB/s per core, faster than
most disks. It is 32 bits wide: a damaged file has the same value once in 4 billion times.
"""

import io
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

READ_BYTES = 2**22  # per read and thread
MAX_THREADS = 8  # zlib releases the GIL


class ChecksumWriter(io.BufferedWriter):
    """A new file opened for writing, with the CRC-32 of what was written to it. It is on disk once it is closed.

    The value comes from the bytes in memory, so that it also finds what was damaged on the way to the disk.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.crc32 = 0

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)

    def close(self) -> None:
        """Flush the buffer and the file to disk. An `fsync` by the file's user does not reach what is in the buffer."""
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()


def crc32_of(paths: Sequence[Path]) -> list[int]:
    """Read files in parallel and return the CRC-32 of each."""
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(_crc32, paths))


def _crc32(path: Path) -> int:
    value = 0
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            value = zlib.crc32(buffer[:size], value)
    return value

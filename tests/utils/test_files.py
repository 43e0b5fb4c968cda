"""File operations that lose nothing, and checksums of what is written and read back."""

import pickle
import zlib
from pathlib import Path

from app.utils.files import READ_BYTES, ChecksumWriter, crc32_of


def test_the_checksum_of_what_is_written_is_that_of_the_file(tmp_path: Path) -> None:
    with ChecksumWriter(tmp_path / "file") as file:
        file.write(b"123456789")
        pickle.dump({"a": list(range(10_000))}, file)
        file.write(memoryview(bytearray(b"xyz" * 100_000)))
    content = (tmp_path / "file").read_bytes()
    assert len(content) > 300_000
    assert file.crc32 == zlib.crc32(content)


def test_files_longer_than_a_read_have_their_checksum_in_order(tmp_path: Path) -> None:
    contents = [b"", b"123456789", bytes(range(256)) * (READ_BYTES // 128 + 1)]
    paths = [tmp_path / str(number) for number in range(3)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert crc32_of(paths) == [0, 0xCBF43926, zlib.crc32(contents[2])]

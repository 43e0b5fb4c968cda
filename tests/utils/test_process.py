"""Memory of this process."""

import psutil

from app.utils.process import trim_heap

MIB = 2**20


def test_trimming_the_heap_returns_what_was_freed_between_blocks_in_use() -> None:
    process = psutil.Process()
    blocks = [bytearray(64 * 1024) for _ in range(3200)]  # 200 MiB, too small for mappings of their own
    kept = blocks[::50]
    del blocks
    before = process.memory_info().rss
    trim_heap()
    assert before - process.memory_info().rss > 150 * MIB
    assert len(kept) == 64

"""Buckets of sequences of similar length. Each bucket is padded to its longest sequence; padding stays below 25 %."""

from collections.abc import Sequence

FILLED = 0.75  # a bucket takes sequences of at least this fraction of its longest one


def length_buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of `lengths` by similar length. The longest sequence of a bucket comes first.

    >>> length_buckets([10, 100, 9, 90])
    [[1, 3], [0, 2]]
    """
    buckets: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if buckets and lengths[index] >= FILLED * lengths[buckets[-1][0]]:
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets

"""Byte units."""

MIB = 1024**2
GIB = 1024**3


def size(count: float) -> str:
    """Format bytes, for sentences.

    >>> size(3.25 * GIB), size(900_000)
    ('3.2 GiB', '0.9 MiB')
    """
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"

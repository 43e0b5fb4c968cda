"""Byte units."""

MIB = 1024**2
GIB = 1024**3


def size(count: float) -> str:
    """Format a number of bytes with a binary unit.

    >>> size(300), size(131072), size(3.5 * MIB), size(24 * GIB)
    ('300 B', '128 KiB', '3.5 MiB', '24.0 GiB')
    """
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    if count >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / 1024:.0f} KiB" if count >= 1024 else f"{count:.0f} B"

"""Byte units."""

MIB = 1024**2
GIB = 1024**3
